"""Compares configurations: trains each with several seeds at one budget, says what differs;
``mmrl.compare(...)`` calls ``mmrl.api.comparing.compare``."""

from mmrl.core.callable_module import make_callable

make_callable(__name__, "mmrl.api.comparing", "compare")
