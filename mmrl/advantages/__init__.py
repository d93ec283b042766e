"""Advantages compare a reward with others; ``mmrl.core.registry.ADVANTAGES`` names them. A name is
loaded when it is first used; a function that has the name of its module is imported from there."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
