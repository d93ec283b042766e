"""Settings that must be made before CUDA starts."""

import os

# what deterministic matrix products need
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
