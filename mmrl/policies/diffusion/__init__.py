"""Holds diffusion and flow models: sampling, scoring and trees of samples."""
