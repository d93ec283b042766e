"""Writes the table of all rewards into docs/rewards.md: run this after adding a reward or changing
its card."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mmrl.cli.reward_table import renewed, short  # noqa: E402

page = ROOT / "docs" / "rewards.md"
page.write_text(renewed(page.read_text(), short()))
