"""Sets up the templates of pages; all text of prompts, answers and configurations is escaped."""

from __future__ import annotations

from typing import Any


def environment(*packages: str, **globals: Any) -> Any:
    """Return jinja2's environment over the templates of these packages, then those of the report.
    ``globals``: what every template may use."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    loaders = [PackageLoader(package) for package in (*packages, "mmrl.monitoring.report")]
    env = Environment(
        loader=ChoiceLoader(loaders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    env.globals.update(globals)
    return env
