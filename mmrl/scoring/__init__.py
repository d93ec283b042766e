"""Scores a batch such that no failure of a reward can pass for a low score: in parallel, cached,
placed.

``Scorer`` is ``(media, prompts) -> Rewards``. Every reward runs without gradients, in its own
thread, on its device, in its precision and batch size, with a cache and the rules for failures.
"""

from mmrl.core.handling import Handling
from mmrl.scoring.attempt import as_values, brief
from mmrl.scoring.handling import Handled
from mmrl.scoring.scorer import Failures, Scorer, Stream

__all__ = ["Failures", "Handled", "Handling", "Scorer", "Stream", "as_values", "brief"]
