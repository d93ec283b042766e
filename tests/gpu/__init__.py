"""Tests of a CUDA device. Where there is none they run on the CPU, so that a renamed option cannot
break them unseen; those that only CUDA can answer are marked gpu and skipped."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
