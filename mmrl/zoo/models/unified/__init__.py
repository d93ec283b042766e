"""Holds policies that write text and draw images in one sequence."""
