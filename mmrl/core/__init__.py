"""Holds the records, distributions and registries that every room uses."""
