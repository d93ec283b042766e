"""Runs the training loop and its passes through the network."""
