"""The doctor tells the truth about what is missing and never falls ill itself."""

import importlib.metadata
import importlib.util

import pytest

from mmrl.cli import doctor


def by_name(checks):
    return {check.name: check for check in checks}


def test_everything_required_is_listed_with_its_version():
    findings = by_name(doctor.diagnose())
    for name in "torch diffusers transformers accelerate peft pyyaml scikit-learn".split():
        assert findings[name].status == "ok" and findings[name].detail[0].isdigit()
    assert {"python", "cpu", "bf16", "sdpa", "runs", "cache", "cached", "hub"} <= findings.keys()
    assert all(check.remedy or check.status != "missing" for check in findings.values())


def test_a_missing_or_old_package_has_a_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: {"torch": "2.1.0+cu118"}.get(name))
    findings = by_name(doctor.check_packages())
    assert (
        findings["torch"].status == "missing" and "2.1.0+cu118, but >=" in findings["torch"].detail
    )
    assert findings["diffusers"].status == "missing" and findings["diffusers"].remedy.startswith(
        'pip install "diffusers>='
    )
    assert not doctor.print_report()


def test_a_check_that_breaks_is_a_warning():
    def check_broken():
        raise OSError("driver is gone")

    (line,) = doctor._guarded(check_broken)
    assert line.status == "warn" and line.name == "broken" and "driver is gone" in line.detail


def test_installed_metadata_is_used_where_there_is_no_checkout(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "somebody-else"\ndependencies = ["nonsense"]\n'
    )
    monkeypatch.setattr(doctor, "PACKAGE", tmp_path / "mmrl")
    requirements = ["torch>=2.10", 'pytest>=8; extra == "dev"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    assert doctor.requirements() == ["torch>=2.10"]


def test_places(monkeypatch, tmp_path):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    findings = by_name(doctor.check_places())
    assert (
        findings["runs"].status == findings["cache"].status == "ok"
        and findings["cached"].detail == "nothing yet"
    )
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()
    assert "HF_HUB_OFFLINE=1" in findings["hub"].detail
    (tmp_path / "cache" / "digits" / "sd3").mkdir(parents=True)
    (tmp_path / "cache" / "digits" / "sd3" / "weights").write_bytes(b"0" * 2**20)
    assert by_name(doctor.check_places())["cached"].detail == "digits/sd3 (1.0 MiB)"


def test_a_place_that_cannot_be_written(monkeypatch, tmp_path):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    findings = by_name(doctor.check_places())
    assert (
        findings["runs"].status == "missing"
        and "Permission denied" in findings["runs"].detail
        and findings["runs"].remedy
    )


@pytest.mark.gpu
def test_a_gpu_is_shown():
    findings = by_name(doctor.diagnose())
    assert "GiB free" in findings["cuda:0"].detail and findings["bf16"].status in ("ok", "warn")
