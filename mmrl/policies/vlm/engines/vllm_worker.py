"""Worker extension of a vLLM server for tied heads on a CPU: ``vllm serve --worker-extension-cls
mmrl.policies.vlm.engines.vllm_worker.TiedHead``."""

from __future__ import annotations

from typing import Any

EXTENSION = "mmrl.policies.vlm.engines.vllm_worker.TiedHead"
METHOD = "repack_tied_head"


class TiedHead:
    """Extends vLLM's worker by methods that a request may call by name."""

    get_model: Any  # the worker's

    def repack_tied_head(self) -> None:
        repack(self.get_model())


def repack(model: Any) -> None:
    """Update a tied head after vLLM has reloaded its weights: on a CPU it uses a packed copy, which
    ``reload_weights`` of vLLM 0.32 does not update."""
    for module in model.modules():
        embeds = type(module).__name__ in ("ParallelLMHead", "VocabParallelEmbedding")
        if embeds and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
