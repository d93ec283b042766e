"""Starts trainings on a Ray cluster: trainers, and workers that sample for them, as actors."""
