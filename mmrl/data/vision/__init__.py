"""Reads questions about images and videos in their usual formats. These modules register the data
sources."""

MODULES = ("paired", "source")
