"""Reads and writes pictures, videos and sound."""
