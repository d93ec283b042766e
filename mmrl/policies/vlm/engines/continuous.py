"""Samples by transformers' continuous batching."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mmrl.core.errors import UserError
from mmrl.policies.vlm.engines.external import GREEDY, EngineAnswer, EnginePrompt
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.generate import Ending
from samplers.warp import Warp

SHARE = 0.4  # of a GPU's free memory for its cache
PAGE = 32  # tokens


class Continuous:
    """Samples by transformers' continuous batching: rows come and go in one paged cache. It takes
    texts, no images."""

    hf: Any  # the model of transformers, once it was handed over
    notes: tuple[str, ...] = ()
    limits = EngineLimits("policy option engine = continuous", images=0, videos=0)

    def __init__(self) -> None:
        # it would log in every rollout
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def suits(self, hf: nn.Module) -> None:
        """Do nothing: it runs the policy's own model."""

    def refresh(self, hf: nn.Module) -> None:
        self.hf = hf

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        from transformers import ContinuousBatchingConfig

        with torch.random.fork_rng():  # it seeds the global generator
            outputs = self.hf.generate_batch(
                [prompt.ids for prompt in prompts],
                generation_config=_options(warp, ending),
                progress_bar=False,
                warmup=False,
                continuous_batching_config=ContinuousBatchingConfig(
                    return_logprobs=True,
                    seed=seeds[0],
                    drop_unsupported_processors=False,
                    **self._room(prompts, ending),
                ),
            )
        if len(outputs) < len(prompts) or any(prompt.error for prompt in outputs.values()):
            why = next(
                (prompt.error for prompt in outputs.values() if prompt.error),
                "some answers are missing",
            )
            raise UserError(
                f"policy option engine = continuous: transformers' continuous "
                f"batching failed: {why}"
            )
        return [
            EngineAnswer(prompt.generated_tokens, prompt.logprobs) for prompt in outputs.values()
        ]

    def _room(self, prompts: Sequence[EnginePrompt], ending: Ending) -> dict[str, Any]:
        """Limit its cache to a share of a GPU's free memory; elsewhere to what these prompts need,
        since all memory would be taken."""
        if self.hf.device.type == "cuda":
            return {"max_memory_percent": SHARE}
        longest = max(len(prompt.ids) for prompt in prompts)
        blocks = len(prompts) * (-(-(longest + ending.tokens) // PAGE) + 1)
        return {
            "page_size": PAGE,
            "num_blocks": blocks,
            "max_batch_tokens": max(longest, len(prompts)),
        }


def _options(warp: Warp, ending: Ending) -> Any:
    from transformers import GenerationConfig

    sampling = (
        {"do_sample": False}
        if warp.temperature == GREEDY
        else {
            "do_sample": True,
            "temperature": warp.temperature,
            "top_k": warp.top_k or 0,
            "top_p": warp.top_p,
        }
    )
    return GenerationConfig(
        max_new_tokens=ending.tokens,
        eos_token_id=list(ending.stops),
        pad_token_id=ending.pad,
        suppress_tokens=list(warp.suppressed) or None,
        **sampling,
    )
