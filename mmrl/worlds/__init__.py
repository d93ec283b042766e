"""Builds embedded worlds: data, captions and tiny base models that need no download. These modules
register their parts."""

MODULES = ("artifacts", "asking", "data", "mazes", "moving", "words.signs")
