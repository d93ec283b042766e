"""Evaluates samples and models on public benchmarks, and writes prompts for them."""
