"""Settings of the numeric libraries: there before torch is, and never in place of the user's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.utils import threads

ROOT = Path(__file__).parents[2]


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setattr(threads, "is_intel", lambda: True)
    chosen = {"GOMP_SPINCOUNT": "7", "MKL_CBWR": "COMPATIBLE"}
    threads.prepare(chosen)
    assert chosen == {"GOMP_SPINCOUNT": "7", "MKL_CBWR": "COMPATIBLE"}
    for alone in ({"OMP_WAIT_POLICY": "passive"}, {"OMP_NUM_THREADS": "1"}):
        threads.prepare(alone)
        assert "GOMP_SPINCOUNT" not in alone, (
            "it would win over the wait policy; one thread waits for nobody"
        )


@pytest.mark.parametrize(("share", "wanted"), [(0.0, threads.SPIN_IDLE), (0.6, threads.SPIN_BUSY)])
def test_threads_spin_less_where_others_need_the_cores(share, wanted, monkeypatch):
    monkeypatch.setattr(threads, "share_in_use", lambda: share)
    environment = {}
    threads.prepare(environment)
    assert environment["GOMP_SPINCOUNT"] == wanted


def test_the_share_in_use_is_what_the_kernel_counted_meanwhile(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1\n")
    later = "cpu  130 0 60 850 60 0 0 0 0 0\n"  # 100 ticks, of which 50 + 10 idle
    monkeypatch.setattr(threads.time, "sleep", lambda _: stat.write_text(later))
    assert threads.share_in_use(stat) == pytest.approx(0.4)
    assert threads.share_in_use(stat) == 0 and threads.share_in_use(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    ("vendor", "wanted"), [("GenuineIntel", {"MKL_CBWR"}), ("AuthenticAMD", set())]
)
def test_only_intel_s_products_are_told_how_to_round(vendor, wanted, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(threads.is_intel, "__defaults__", (tmp_path / "cpuinfo",))
    environment = {}
    threads.prepare(environment)
    assert set(environment) == wanted | {"GOMP_SPINCOUNT"}
    assert not threads.is_intel(tmp_path / "missing")


def test_the_command_sets_them_before_torch_is_loaded():
    program = (
        "import json, os, sys; import mmrl.cli.app; import mmrl.utils.threads as threads\n"
        "prepare = threads.prepare\n"
        "threads.prepare = lambda: (prepare(), print(json.dumps(['torch' in sys.modules, "
        "dict(os.environ)])))\n"
        "sys.argv = ['mmrl', '--help']; mmrl.cli.app.main()\n"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "OMP"))
    }
    environment |= {"PYTHONPATH": str(ROOT)}
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout
    loaded, settings = json.loads(shown.splitlines()[0])
    assert not loaded and settings["GOMP_SPINCOUNT"] in (threads.SPIN_IDLE, threads.SPIN_BUSY)
