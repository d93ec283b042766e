"""Commands under a locale that knows ASCII alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.skipif(os.name != "posix", reason="locales are POSIX's")
def test_a_locale_without_utf8_ends_in_no_traceback(tmp_path):
    """A file that names a plug-in in Chinese is read, and the mistake in it is reported."""
    config = tmp_path / "运行.yaml"
    config.write_text("# 注释 → comment\npolicy: {明るさ: {}}\n", encoding="utf-8")
    command = [sys.executable, "-m", "mmrl", "train", str(config)]
    environment = os.environ | ASCII | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True)
    said = done.stderr.decode("utf-8")
    assert done.returncode == 2 and "Traceback" not in said
    assert "运行.yaml" in said and "明るさ" in said
