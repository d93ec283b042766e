"""Holds vision-language models of transformers: image-text-to-text policies."""
