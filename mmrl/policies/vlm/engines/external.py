"""Runs engines that sample by themselves: transformers' continuous batching, and vLLM where it is
installed.

The policy's own passes score their answers again: ``Rollout.sampler_logprob`` keeps their
log-probs, the log shows the gap, and the objective's ``importance_sampling`` corrects for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.policies.lora import merged
from mmrl.policies.vlm.generate import Answers, Ending, blank
from mmrl.policies.vlm.media import Video
from samplers.noise import Rng
from samplers.warp import Warp

GREEDY = 0.0
SHARE = 0.4  # of a GPU's free memory for an engine's cache
PAGE = 32  # tokens


@dataclass(frozen=True)
class EnginePrompt:
    """Holds a prompt in the form an engine takes."""

    name: str  # for messages
    ids: list[int]  # its tokens, one placeholder for each image or video
    read: list[int]  # its tokens as the policy reads them, a placeholder for every feature
    images: list[Any] = field(default_factory=list)  # PIL, within the budget
    videos: list[Video] = field(default_factory=list)


class EngineAnswer(NamedTuple):
    """Holds an engine's answer."""

    ids: Sequence[int]
    logprobs: Sequence[float]  # of these tokens, under the distribution they were drawn from


class Outside(Protocol):
    """Defines what an engine beside the policy offers."""

    def refresh(self, hf: nn.Module) -> None:
        """Copy the current weights into the engine."""

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        """Return one answer for each prompt; ``seeds`` key their randomness, as far as the engine
        takes seeds."""


def ask(
    engine: Outside,
    hf: nn.Module,
    prompts: Sequence[EnginePrompt],
    names: Tensor,
    rng: Rng,
    warp: Warp,
    ending: Ending,
) -> Answers:
    """Sample B answers with an engine; ``names`` [B] as in ``generate``. ``logprob`` is the
    engine's own."""
    if "self_certainty" in ending.quantities:
        raise UserError(
            "policy options engine and record_self_certainty: another engine does not say how "
            "sure the model was"
        )
    engine.refresh(hf)
    seeds = rng.bits(names, 1)[:, 0].tolist()
    answers = blank(names, ending, hf)
    for row, answer in enumerate(engine.answer(prompts, seeds, warp, ending)):
        ids = torch.tensor(list(answer.ids)[: ending.tokens], dtype=torch.long, device=names.device)
        length = _end(ids, ending)
        answers.ids[row, :length], answers.mask[row, :length] = ids[:length], True
        answers.logprob[row, :length] = torch.tensor(list(answer.logprobs)[:length]).to(
            answers.logprob
        )
    return answers


def _end(ids: Tensor, ending: Ending) -> int:
    """Count the tokens of ids [n] up to the one that ends the answer; what an engine wrote beyond a
    stop string it does not know is left out."""
    return next((i for i in range(1, len(ids) + 1) if ending.ended(ids[None, :i]).any()), len(ids))


class Continuous:
    """Samples by transformers' continuous batching: rows come and go in one paged cache. It takes
    texts, no images."""

    hf: Any  # the model of transformers, once it was handed over

    def __init__(self, place: str = "", dtype: str = ""):
        # it would log in every rollout
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)

    def refresh(self, hf: nn.Module) -> None:
        self.hf = hf

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        from transformers import ContinuousBatchingConfig

        for prompt in prompts:
            if prompt.images or prompt.videos:
                raise UserError(
                    f"{prompt.name}: policy option engine = continuous is for texts, since "
                    f"transformers' continuous "
                    "batching takes no images; use own, hf or vllm"
                )
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


class VLLM:
    """Samples by vLLM in the same process: its workers get the weights before every rollout.

    There is one engine a process, on the process's own device; between rollouts it sleeps and gives
    its memory back.
    """

    def __init__(self, place: str, dtype: str, share: float = SHARE, images: int = 8):
        """Start the engine. share: part of the device's memory it may use. images: the most a
        prompt has."""
        if find_spec("vllm") is None:
            raise UserError(
                "policy option engine = vllm needs the package vllm (pip install "
                "vllm), and a CUDA device"
            )
        # else the weights would have to be sent to it
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        self.llm = LLM(
            model=place,
            dtype=dtype,
            gpu_memory_utilization=share,
            enable_sleep_mode=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            limit_mm_per_prompt={"image": images, "video": 1},
            seed=0,
            distributed_executor_backend="external_launcher"
            if torch.distributed.is_initialized()
            else None,
        )
        self.asleep = False

    def refresh(self, hf: nn.Module) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
        weights = [(name, value.detach()) for name, value in merged(hf).items()]
        self.llm.apply_model(lambda model: model.load_weights(iter(weights)) and None)
        self.llm.reset_prefix_cache()  # it holds keys and values of the previous weights

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        from vllm import SamplingParams

        options = {
            "temperature": warp.temperature,
            "top_k": warp.top_k or 0,
            "top_p": warp.top_p,
            "logprobs": 0,
            "max_tokens": ending.tokens,
            "stop_token_ids": list(ending.stops),
            "stop": list(ending.strings),
            "logit_bias": dict.fromkeys(warp.suppressed, -100.0) or None,
            "skip_special_tokens": False,
        }
        requests = [_request(prompt) for prompt in prompts]
        outputs = self.llm.generate(
            requests, [SamplingParams(seed=seed, **options) for seed in seeds], use_tqdm=False
        )
        self.llm.sleep(level=1)
        self.asleep = True
        for prompt, output in zip(prompts, outputs, strict=True):
            if list(output.prompt_token_ids) != prompt.read:
                raise UserError(
                    f"{prompt.name}: policy option engine = vllm: it reads this prompt as "
                    f"{len(output.prompt_token_ids)} "
                    f"tokens where the policy reads {len(prompt.read)}, so its answers would "
                    f"be to something else; its "
                    "processor has other settings than the model's folder, or the family "
                    "is read in another way there"
                )
        first = [output.outputs[0] for output in outputs]
        return [
            EngineAnswer(o.token_ids, [p[i].logprob for p, i in zip(o.logprobs, o.token_ids)])
            for o in first
        ]


def _request(prompt: EnginePrompt) -> dict[str, Any]:
    """Build a prompt as vLLM takes it: its own processor replaces the placeholders."""
    media: dict[str, Any] = {}
    if prompt.images:
        media["image"] = prompt.images
    if prompt.videos:
        media["video"] = [
            (video.frames, video.metadata() | {"do_sample_frames": False})
            for video in prompt.videos
        ]
    return {"prompt_token_ids": prompt.ids} | ({"multi_modal_data": media} if media else {})


ENGINES: dict[str, type] = {"continuous": Continuous, "vllm": VLLM}
