"""Holds one file for each family of models that write images as tokens."""
