"""Builds embedded worlds: data, captions and tiny base models that need no download. Importing
registers, builds nothing."""

from mmrl.worlds import artifacts, asking, data, mazes, moving

__all__ = ["artifacts", "asking", "data", "mazes", "moving"]
