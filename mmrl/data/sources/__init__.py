"""Reads rows from the files and data sets that people have: one reader for all data sources."""
