"""One thin file a diffusion or flow model family."""
