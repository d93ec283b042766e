"""Estimates what a run needs, from its configuration alone."""
