"""How MKL rounds: set before torch is loaded, and never in place of the user's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.core import rounding

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("vendor", "wanted"), [("GenuineIntel", {"MKL_CBWR"}), ("AuthenticAMD", set())]
)
def test_only_intel_s_products_are_told_how_to_round(vendor, wanted, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(rounding.is_intel, "__defaults__", (tmp_path / "cpuinfo",))
    environment = {}
    rounding.prepare(environment)
    assert set(environment) == wanted
    assert not rounding.is_intel(tmp_path / "missing")
    chosen = {"MKL_CBWR": "COMPATIBLE"}  # what the user has set stays
    rounding.prepare(chosen)
    assert chosen == {"MKL_CBWR": "COMPATIBLE"}


def test_the_command_sets_it_before_torch_is_loaded():
    program = (
        "import json, sys; import mmrl.cli.app; import mmrl.core.rounding as rounding\n"
        "rounding.prepare = lambda: print(json.dumps('torch' in sys.modules))\n"
        "sys.argv = ['mmrl', '--help']; mmrl.cli.app.main()\n"
    )
    command, environment = [sys.executable, "-c", program], {"PYTHONPATH": str(ROOT)}
    shown = subprocess.check_output(command, env=os.environ | environment, text=True)
    assert shown.startswith("false\n")
