"""Implements the command line."""

from mmrl.cli.app import main

__all__ = ["main"]
