"""Compares configurations: trains each with several seeds at one budget, reports differences."""
