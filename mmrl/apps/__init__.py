"""Programs around the training loop: each may be left out without the loop noticing."""
