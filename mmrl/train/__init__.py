"""The training loop and what runs its passes."""
