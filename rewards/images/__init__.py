"""Scores pictures: preference, similarity, quality, what is in them."""
