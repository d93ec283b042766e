"""Reads a run's YAML file, applies overrides ``a.b=c``, checks it as a whole and builds it by name;
``mmrl.config.configuration`` says how. A name is loaded when it is first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
