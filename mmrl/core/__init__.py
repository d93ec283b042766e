"""Holds the records, distributions and registries that all other packages use."""
