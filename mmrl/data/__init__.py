"""Reads prompts and chooses which come next."""
