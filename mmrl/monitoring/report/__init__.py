"""Writes one HTML page about a run: read the folder back, draw charts, compare pictures. Start with
``page``."""
