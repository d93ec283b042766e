"""Diffusion and flow models: samplers, scoring, trees."""
