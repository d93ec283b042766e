"""Images as sequences of tokens: one file a model family on one base for sampling, guidance and
scoring."""
