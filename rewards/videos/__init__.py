"""Rewards of videos and their sound."""
