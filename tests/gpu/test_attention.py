"""Attention backends, compiled blocks, paths on the CPU and passes that do not fit, on a CUDA
device."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.diffusion import attention_backends
from tests.gpu import DEVICE
from tests.policies.diffusion.test_folder_families import trainer_of
from tests.train.test_fitting import make

CASES = ["flux", "sd"]
BACKENDS = ["auto", "sdpa", "xformers", "flash"]


def made(case, backend, **options):
    try:
        return make(case, attention=backend, fixed_batch_rows=4, **options)
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_step_is_on_policy_on_every_backend(case, backend):
    trainer = trainer_of(
        made(case, backend, guidance_scale=2.0, lora=2, dtype="bfloat16"), precision="bf16"
    )
    try:
        metrics = trainer.iterate()
    except UserError as error:  # tiny heads do not suit every kernel
        pytest.skip(str(error))
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    assert trainer.policy.attending.used in attention_backends.BACKENDS


@pytest.mark.gpu  # a compiler's minute; on a CPU in tests/policies/diffusion
@pytest.mark.parametrize("options", [{"guidance_scale": 2.0}, {"lora": 2}], ids=str)
def test_compiled_blocks_are_on_policy(options):
    torch._dynamo.reset()
    metrics = trainer_of(make("flux", compile=True, **options)).iterate()
    assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0


@pytest.mark.gpu
def test_a_pass_that_does_not_fit_is_halved():
    trainer = trainer_of(make("flux", guidance_scale=2.0))
    # rows of the network, guided ones twice
    plain = trainer.policy.velocity
    limit = 4

    def velocity(x, t, cond):
        if len(x) > limit:
            torch.empty(2**45, dtype=torch.uint8, device=DEVICE)  # 32 TiB
        return plain(x, t, cond)

    trainer.policy.velocity = velocity
    metrics = trainer.iterate()
    assert trainer.policy.pass_sizes.max_micro_batch == 2 and trainer.policy.report.warnings
    assert metrics["ratio/max_deviation"] < 1e-4
