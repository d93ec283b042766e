"""Programs around the training loop, which does not depend on them."""
