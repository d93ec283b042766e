"""Offers mmrl to Python programs and notebooks: the same objects as the command line, without
global state. All of it is in ``import mmrl``; see docs/api.md."""
