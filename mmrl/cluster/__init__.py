"""Puts work on the machines of a Ray cluster: joins one, and keeps pools of workers there."""
