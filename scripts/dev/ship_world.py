"""Builds the artifacts of the digits world for quickstart and puts them into the package,
``mmrl/worlds/shipped``.

    python scripts/dev/ship_world.py

Run it after a change of ``mmrl/worlds/recipes.py`` that affects quickstart (a test requires it),
and commit the result. Artifacts cached under the current recipe are copied, others are built, which
takes minutes of CPU time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mmrl.cli.commands import QUICKSTART
from mmrl.core.registry import ARTIFACTS, load_built_in
from mmrl.worlds import cache


def ship(name: str, target: Path) -> Path:
    """Replace the shipped folder of this artifact by the cached one, building it if necessary."""
    built = ARTIFACTS.find(name)()
    folder = target / name
    shutil.rmtree(folder, ignore_errors=True)
    # not the file modes, which are private
    shutil.copytree(built, folder, copy_function=shutil.copyfile)
    return folder


def main() -> None:
    """Ship everything that quickstart names."""
    load_built_in()
    target = cache.SHIPPED
    cache.SHIPPED = Path(
        "/nonexistent"
    )  # the currently shipped artifacts must not replace built ones
    for name in QUICKSTART:
        folder = ship(name, target)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
