"""Computes rewards and judgements elsewhere, over HTTP."""
