"""Encodes prompts: each text once, cached on the CPU; the text encoders then leave the
accelerator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, Any, Literal

import torch

from mmrl.core.effects import FREE_AT_RESUME
from mmrl.core.errors import UserError
from mmrl.core.types import Prompt, tree_map
from mmrl.policies.diffusion import diffusers_folder

Placement = Annotated[Literal["offload", "release", "keep", "cpu"], FREE_AT_RESUME]
Encoding = dict[str, Any]  # nest of tensors [1, *] of one key


def texts_of(prompts: list[Prompt]) -> list[str]:
    """Return the text of every prompt. UserError names the first that has none."""
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt.get("text"), str):
            raise UserError(
                f"prompt {i} has no 'text', which this model reads; it has: "
                f"{', '.join(prompt) or 'nothing'}"
            )
    return [prompt["text"] for prompt in prompts]


class PromptCache:
    """Caches encodings by text, first in first out; a key may be anything hashable, such as a text
    with its image.

    ``load`` returns the text pipeline; ``encode(pipeline, texts, device)`` a nest of tensors [n,
    *]. After every use the pipeline stays on the device ("keep"), goes to the CPU ("offload") or is
    dropped and loaded again for a text that was not encoded before ("release"). On the "cpu" it
    encodes there, slowly, for cards on which it does not fit along with the network.
    """

    def __init__(
        self,
        load: Callable[[], Any],
        encode: Callable[[Any, list[Any], torch.device], Encoding],
        placement: Placement,
        limit: int,
        batch: int = 32,
    ):
        self.load = load
        self.encode = encode
        self.placement = placement
        self.limit = limit
        self.batch = batch
        self.pipeline: Any = None
        self.encodings: dict[Hashable, Encoding] = {}

    def of(self, encode: Callable[[Any, list[Any], torch.device], Encoding]) -> PromptCache:
        """Make an empty cache for other keys, which ``encode`` encodes."""
        return PromptCache(self.load, encode, self.placement, self.limit, self.batch)

    def __call__(self, texts: Sequence[Hashable], device: torch.device) -> Encoding:
        """Return the encodings of the keys, a nest of tensors [P, *] on ``device``."""
        fresh = {text: None for text in texts if text not in self.encodings}
        if fresh:
            self._encode(list(fresh), device)
        rows = [self.encodings[text] for text in texts]
        while len(self.encodings) > self.limit:
            del self.encodings[next(iter(self.encodings))]
        return {key: torch.cat([row[key] for row in rows]).to(device) for key in rows[0]}

    @torch.no_grad()
    def _encode(self, texts: list[Hashable], device: torch.device) -> None:
        pipeline = self.pipeline or self.load()
        if self.placement == "cpu":
            device = torch.device("cpu")
        pipeline.to(device)
        for start in range(0, len(texts), self.batch):
            part = texts[start : start + self.batch]
            with diffusers_folder.quiet():
                encoded = tree_map(lambda tensor: tensor.cpu(), self.encode(pipeline, part, device))
            for i, text in enumerate(part):
                # a plain str, without attributes of subclasses
                key = str(text) if isinstance(text, str) else text
                self.encodings[key] = {
                    name: value[i : i + 1].clone() for name, value in encoded.items()
                }
        if self.placement == "offload":
            pipeline.to("cpu")
        self.pipeline = None if self.placement == "release" else pipeline
