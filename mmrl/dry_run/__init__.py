"""What a run would need, told from its configuration alone."""
