"""Holds masked diffusion models."""
