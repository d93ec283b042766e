"""Handles files and paths, and reads facts about the machine."""
