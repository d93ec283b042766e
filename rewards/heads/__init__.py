"""Heads on frozen features, and the programs that fit them."""
