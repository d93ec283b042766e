"""Holds the parts of gpu_check.py; ``listing`` names them all."""
