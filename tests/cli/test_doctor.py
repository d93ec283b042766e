"""The doctor tells the truth about what is missing and never falls ill itself."""

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
    assert findings["torch"].status == findings["diffusers"].status == "missing"
    assert "2.1.0+cu118, but >=" in findings["torch"].detail
    assert findings["diffusers"].remedy.startswith('pip install "diffusers>=')
    assert not doctor.print_report()


def test_places(monkeypatch, tmp_path):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    findings = by_name(doctor.check_places())
    assert findings["runs"].status == findings["cache"].status == "ok"
    assert findings["cached"].detail == "nothing yet"
    assert not (tmp_path / "runs").exists() and not (tmp_path / "cache").exists()
    assert "HF_HUB_OFFLINE=1" in findings["hub"].detail
    (tmp_path / "cache" / "digits" / "sd3").mkdir(parents=True)
    (tmp_path / "cache" / "digits" / "sd3" / "weights").write_bytes(b"0" * 2**20)
    assert by_name(doctor.check_places())["cached"].detail == "digits/sd3 (1.0 MiB)"


@pytest.mark.gpu
def test_a_gpu_is_shown():
    findings = by_name(doctor.diagnose())
    assert "GiB free" in findings["cuda:0"].detail and findings["bf16"].status in ("ok", "warn")
