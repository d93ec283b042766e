"""Measures samples and models on the benchmarks of the field, and writes prompts for them."""
