"""A stand-in for the package ``vllm``, with the signatures of its offline API (``vllm.LLM``,
``vllm.SamplingParams`` of 0.10 to 0.12) and transformers underneath: slow, in one process, and
exact."""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        seed: int | None = None,
        enable_sleep_mode: bool = False,
        generation_config: str = "auto",
        logprobs_mode: str = "raw_logprobs",
        limit_mm_per_prompt: dict[str, int] | None = None,
        distributed_executor_backend: Any = None,
    ):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        assert logprobs_mode == "processed_logprobs" and generation_config == "vllm"
        self.hf = AutoModelForImageTextToText.from_pretrained(model, dtype=getattr(torch, dtype))
        self.processor = AutoProcessor.from_pretrained(model)
        self.limits = limit_mm_per_prompt
        self.sleeps = enable_sleep_mode
        self.calls = []

    def sleep(self, level: int = 1) -> None:
        assert self.sleeps
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append("wake_up")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def apply_model(self, func: Any) -> list[Any]:
        self.calls.append("apply_model")

        def load_weights(weights: Any) -> set[str]:
            state = dict(weights)
            self.hf.load_state_dict(state)
            return set(state)

        return [func(types.SimpleNamespace(load_weights=load_weights))]

    @torch.no_grad()
    def generate(
        self, prompts: list[dict], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list:
        self.calls.append("generate")
        return [
            self._one(prompt, params)
            for prompt, params in zip(prompts, sampling_params, strict=True)
        ]

    def _one(self, prompt: dict, params: SamplingParams) -> RequestOutput:
        images = prompt.get("multi_modal_data", {}).get("image")
        assert images is None or len(images) <= self.limits["image"]
        text = self.processor.tokenizer.decode(prompt["prompt_token_ids"])
        given = dict(
            self.processor(text=[text], images=[images] if images else None, return_tensors="pt")
        )
        read = given["input_ids"][0].tolist()
        found = CompletionOutput()
        generator = torch.Generator().manual_seed(params.seed)
        while len(found.token_ids) < params.max_tokens and found.finish_reason is None:
            token, logprob = self._next(given, params, generator)
            found.token_ids.append(token)
            found.logprobs.append({token: Logprob(logprob)})
            told = self.processor.tokenizer.decode(
                found.token_ids, skip_special_tokens=params.skip_special_tokens
            )
            if token in params.stop_token_ids or any(stop in told for stop in params.stop):
                found.finish_reason = "stop"
            for name, value in (
                ("input_ids", token),
                ("attention_mask", 1),
                ("mm_token_type_ids", 0),
            ):
                if name in given:
                    given[name] = torch.cat([given[name], torch.tensor([[value]])], 1)
        return RequestOutput(read, [found])

    def _next(
        self, given: dict, params: SamplingParams, generator: torch.Generator
    ) -> tuple[int, float]:
        logits = self.hf(**given).logits[0, -1].float()
        for token, bias in (params.logit_bias or {}).items():
            logits[token] += bias
        if params.temperature == 0:
            return int(logits.argmax()), 0.0
        logits = logits / params.temperature
        if params.top_k:
            logits[logits < logits.topk(params.top_k).values[-1]] = -torch.inf
        logprobs = logits.log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        return token, float(logprobs[token])


def module() -> types.ModuleType:
    found = types.ModuleType("vllm")
    found.LLM = LLM
    found.SamplingParams = SamplingParams
    return found
