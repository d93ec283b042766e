"""Holds one file for each family of masked models."""
