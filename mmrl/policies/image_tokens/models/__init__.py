"""One file a family of models that write images as tokens."""
