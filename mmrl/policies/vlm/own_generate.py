"""Calls the ``generate`` of a transformers class."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mmrl.policies.vlm.positions import following_the_prompt


def run(hf: Any, inputs: dict[str, Tensor], recorder: Any, synced: bool) -> None:
    """Call ``generate`` once, with none of the checkpoint's own sampling options."""
    from transformers import (
        GenerationConfig,
        GenerationMixin,
        LogitsProcessorList,
        StoppingCriteriaList,
    )

    config = GenerationConfig(
        max_new_tokens=recorder.ending.tokens,
        do_sample=False,
        pad_token_id=recorder.ending.pad,
        use_cache=True,
    )
    # a class's override may accept a logits processor and drop it (Janus)
    of_class = type(hf).generate
    by_name = "logits_processor" in inspect.signature(of_class).parameters
    generate = GenerationMixin.generate if by_name else of_class
    with _without_own_options(hf, config), following_the_prompt(hf):
        generate(
            hf,
            **inputs,
            generation_config=config,
            logits_processor=LogitsProcessorList([recorder]),
            synced_gpus=synced,
            stopping_criteria=StoppingCriteriaList([recorder.ended]),
        )


@contextmanager
def _without_own_options(hf: Any, config: Any) -> Any:
    """Remove the checkpoint's generation options within the block; they would fill unset fields of
    ``config``."""
    before = hf.generation_config
    hf.generation_config = config
    try:
        yield
    finally:
        hf.generation_config = before
