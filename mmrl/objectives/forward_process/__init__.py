"""Objectives that re-noise finished samples."""
