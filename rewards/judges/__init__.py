"""Scores by a vision-language model as judge."""
