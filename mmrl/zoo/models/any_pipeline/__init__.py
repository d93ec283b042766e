"""Policies from any pipeline of diffusers, whose call is replayed."""
