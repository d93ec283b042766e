"""Reads rows from files and data sets in common formats: one reader for all data sources."""
