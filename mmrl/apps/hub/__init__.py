"""Publishes runs on the Hugging Face hub: weights, a model card with the evidence, and how to load
them. Start with ``command``."""
