"""Objectives that look at finished samples, noised again."""
