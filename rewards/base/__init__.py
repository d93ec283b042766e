"""Holds what rewards share: media as frames, fields of a prompt, loading of models, precision."""
