"""Shared by the two vLLM engines: options, sampling parameters, and supported versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Lt

from mmrl.core.errors import UserError
from mmrl.core.numbers import Count
from mmrl.policies.vlm.generate import Ending
from samplers.warp import Warp

OLDEST = (0, 32)  # oldest version tried: older ones lack routes and arguments
TRIED = "0.32"
IMPOSSIBLE = -100.0  # the lowest bias that vLLM takes
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the LoRA ranks that vLLM supports


@dataclass(frozen=True)
class VLLMOptions:
    """Sets how vLLM samples for the engines vllm and vllm-server.

    sync: what is sent before a rollout: "weights", all of them with adapters merged, or "lora",
    only the adapters, which vLLM adds to the base model that it loaded at the start.

    For vllm. gpu_memory_utilization: share of the device's memory that it may use. kv_cache_gib:
    memory for keys and values; null: vLLM's own rule. max_model_len: maximum tokens of prompt and
    answer; null: the model's. max_images: maximum images per prompt. enforce_eager: without CUDA
    graphs. enable_sleep_mode: free memory between rollouts, on CUDA.

    For vllm-server. server_base_url: its address, without /v1; a key is read from the environment
    variable VLLM_API_KEY. server_timeout: seconds for a request. weight_transfer: how weights are
    sent: "folder", as safetensors through shared_folder, which both machines see under that path;
    or "nccl", vLLM's weight-transfer API between CUDA devices, with this process as master.
    shared_folder: that folder. master_address: where the server finds this process, with nccl.
    group_port: the port there. concurrency: concurrent requests.
    """

    sync: Literal["weights", "lora"] = "weights"
    gpu_memory_utilization: Annotated[float, Gt(0), Lt(1)] = 0.4
    kv_cache_gib: Annotated[float, Gt(0)] | None = None
    max_model_len: Count | None = None
    max_images: Count = 8
    enforce_eager: bool = False
    enable_sleep_mode: bool = True
    server_base_url: str = "http://127.0.0.1:8000"
    server_timeout: Annotated[float, Gt(0)] = 240.0
    weight_transfer: Literal["folder", "nccl"] = "folder"
    shared_folder: str | None = None
    master_address: str = "127.0.0.1"
    group_port: Annotated[int, Ge(1), Lt(65536)] = 51216
    concurrency: Count = 64


@dataclass(frozen=True)
class Setup:
    """Holds an engine's model: folder or hub id, dtype of the weights, and rank of adapters (0:
    none)."""

    place: str
    dtype: str
    options: VLLMOptions
    rank: int = 0

    def check(self) -> None:
        """Raise UserError for options that exclude each other."""
        if self.options.sync == "lora" and not self.rank:
            raise UserError(
                "policy option vllm.sync = lora: nothing but adapters would travel, and policy "
                "option lora sets none; set lora, or sync: weights"
            )

    @property
    def room(self) -> int:
        """Return the smallest rank that vLLM supports for the adapter."""
        rank = next((size for size in RANKS if size >= self.rank), None)
        if rank is None:
            raise UserError(
                f"policy option vllm.sync = lora: vLLM takes adapters of rank {RANKS[-1]} at most, "
                f"and policy option lora has {self.rank}; use sync: weights"
            )
        return rank


def check_version(text: str, whose: str) -> None:
    """Raise UserError for a vLLM that is too old; ``whose`` names it."""
    parts = text.split(".")
    number = tuple(int(part) for part in parts[:2] if part.isdigit())
    if len(number) == 2 and number < OLDEST:
        raise UserError(
            f"{whose} is vLLM {text}, and mmrl needs {TRIED} or newer (it was tried with {TRIED}); "
            f'pip install "vllm>={TRIED}"'
        )


def sampling(warp: Warp, ending: Ending, seed: int) -> dict[str, Any]:
    """Build the fields of vLLM's SamplingParams for an answer, also fit for JSON.

    The distribution is the policy's: temperature, truncation, and tokens that may not be drawn. An
    answer ends at the policy's stop tokens and strings, and keeps the token that ended it.
    """
    return {
        "temperature": warp.temperature,
        "top_k": warp.top_k or 0,
        "top_p": warp.top_p,
        "logprobs": 0,
        "max_tokens": ending.tokens,
        "stop_token_ids": list(ending.stops),
        "stop": list(ending.strings),
        "logit_bias": dict.fromkeys(warp.suppressed, IMPOSSIBLE) or None,
        "skip_special_tokens": False,
        "seed": seed,
    }
