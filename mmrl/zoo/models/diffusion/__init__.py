"""Holds one thin file for each diffusion or flow model family."""
