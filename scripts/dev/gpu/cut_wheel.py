"""Removes shared libraries from a wheel that the target machine does not need.

python scripts/dev/gpu/cut_wheel.py WHEEL REGEX  # keeps the .so files that match REGEX
"""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path


def cut(wheel: Path, keep: str) -> None:
    """Rewrite the wheel without the .so files, in folders of any depth, that do not match."""

    def dropped(name: str) -> bool:
        name = name.rsplit("/", 1)[-1]
        return name.endswith(".so") and not re.fullmatch(keep, name)

    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as small:
        for item in whole.infolist():
            if dropped(item.filename):
                continue
            data = whole.read(item)
            if item.filename.endswith(".dist-info/RECORD"):  # pip checks files against it
                lines = data.decode().splitlines(keepends=True)
                data = "".join(x for x in lines if not dropped(x.split(",")[0])).encode()
            small.writestr(item, data)
    os.replace(part, wheel)


if __name__ == "__main__":
    cut(Path(sys.argv[1]), sys.argv[2])
