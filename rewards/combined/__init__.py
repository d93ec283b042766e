"""Makes rewards of rewards."""
