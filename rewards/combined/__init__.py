"""Combines rewards into new ones."""
