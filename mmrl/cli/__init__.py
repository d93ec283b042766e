"""Implements the command line: ``mmrl.cli.app.main``."""
