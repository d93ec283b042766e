"""Writes one HTML page about a run: reads the folder, draws charts, compares pictures. Start with
``page``."""
