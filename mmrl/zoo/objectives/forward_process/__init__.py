"""Objectives on finished samples that are noised again (the forward process)."""
