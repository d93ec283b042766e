"""Builds what quickstart needs of the digits world and puts it into the package,
``mmrl/worlds/shipped``.

    python scripts/dev/ship_world.py

Run it after a change of ``mmrl/worlds/recipes.py`` that concerns quickstart (a test asks for it),
and commit what it writes. What the cache has under the present recipe is copied, anything else is
built: minutes of a processor's time.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from mmrl.cli.commands import QUICKSTART
from mmrl.core.registry import ARTIFACTS, load_built_in
from mmrl.worlds import cache


def ship(name: str, target: Path) -> Path:
    """Replace the shipped folder of this artifact by the cached one, built now if it is not
    there."""
    built = ARTIFACTS.find(name)()
    folder = target / name
    shutil.rmtree(folder, ignore_errors=True)
    # not the modes, which are private
    shutil.copytree(built, folder, copy_function=shutil.copyfile)
    return folder


def main() -> None:
    """Ship everything that quickstart names."""
    load_built_in()
    target = cache.SHIPPED
    cache.SHIPPED = Path("/nonexistent")  # what is shipped now must not stand in for what is built
    for name in QUICKSTART:
        folder = ship(name, target)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
