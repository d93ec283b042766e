"""Reads questions about images and videos, from the formats they come in. These modules register
the data sources."""

MODULES = ("paired", "source")
