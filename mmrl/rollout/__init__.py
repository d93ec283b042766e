"""Collects samples and chooses which groups are trained on."""
