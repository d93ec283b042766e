"""Builds, runs, saves and evaluates a training run."""
