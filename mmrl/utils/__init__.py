"""Files, paths and facts about the machine."""
