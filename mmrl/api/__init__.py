"""Offers mmrl to Python programs and notebooks: the same objects as the command line, without
global state. ``import mmrl`` has all of it; docs/api.md describes it."""
