"""Vision-language models of transformers: image-text-to-text policies."""
