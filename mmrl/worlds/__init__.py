"""Builds embedded worlds: data, captions and tiny base models that need no download. These modules
register what a world offers."""

MODULES = ("artifacts", "asking", "data", "mazes", "moving")
