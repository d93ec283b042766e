"""Computes rewards and judgements over HTTP."""
