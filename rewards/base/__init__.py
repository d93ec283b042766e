"""Holds what rewards share: media as frames, prompt fields, model loading, precision."""
