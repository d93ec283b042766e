"""Reads and writes pictures, videos and sound."""

USUAL_RATE = 16.0  # default frames a second of a model's videos
