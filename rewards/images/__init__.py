"""Scores pictures: preference, similarity, quality, content."""
