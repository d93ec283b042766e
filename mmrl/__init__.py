"""mmrl: reinforcement fine-tuning for vision-language models and image and video generators."""

__version__ = "0.1.0"
