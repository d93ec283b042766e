"""Reads and writes pictures, videos and sound."""

USUAL_RATE = 16.0  # frames a second of the videos of a model that says no other
