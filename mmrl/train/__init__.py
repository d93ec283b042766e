"""Runs the training loop and its passes through the network; ``mmrl.train(...)`` calls
``mmrl.api.runs.train``."""

from mmrl.core.callable_module import make_callable

make_callable(__name__, "mmrl.api.runs", "train")
