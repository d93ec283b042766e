"""Holds models that write images as sequences of tokens: one file for each family on one base for
sampling, guidance and scoring."""
