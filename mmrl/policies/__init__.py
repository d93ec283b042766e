"""Policies: one thin file a model family."""
