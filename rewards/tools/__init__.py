"""Holds programs that make what rewards need: fitted heads, instructions and their versions."""
