"""Writes down what a run did and warns when it goes wrong."""
