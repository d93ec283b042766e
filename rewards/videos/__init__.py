"""Scores videos and their sound."""
