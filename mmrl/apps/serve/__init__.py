"""Serves rewards over HTTP: ``mmrl serve-reward``. Start with ``server``."""
