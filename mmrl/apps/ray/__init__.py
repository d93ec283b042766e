"""Trains, samples and scores on a Ray cluster."""
