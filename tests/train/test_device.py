"""What a launcher's environment and the weights' type may and may not do to training, in one
process."""

from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.policies.lora import Lora
from mmrl.train.device import Device
from mmrl.train.optimizers import sgd
from mmrl.zoo.models.diffusion.wan import Experts
from tests.fixtures import toys
from tests.train.test_trainer import make_trainer

SIZES = {"prompts_per_iteration": 1, "group_size": 2, "train_batch_size": 2, "iterations": 1}


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, None),
    ],
)
def test_other_ways_to_share_a_model_out_than_fsdp2_are_refused(monkeypatch, environment, named):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if named is None:
        assert not Device(TrainOptions(**SIZES)).sharded  # one process alone
        return
    with pytest.raises(UserError, match=f"configured for {named}, .*--fsdp_version 2"):
        Device(TrainOptions(**SIZES))


def test_the_launchers_gradient_accumulation_divides_nothing(monkeypatch):
    weights = []
    for steps in ("1", "4"):
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
        trainer = make_trainer(max_grad_norm=None, optimizer=partial(sgd, lr=1.0))
        trainer.iterate()
        weights.append(trainer.policy.weights.full())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_processes_wait_for_one_another_as_long_as_the_options_say():
    handler = Device(TrainOptions(**SIZES, timeout=77)).accelerator.init_handler
    assert handler.timeout == timedelta(seconds=77) and "backend" not in handler.to_kwargs()


def test_weights_in_half_precision_are_not_trained():
    """In bfloat16 a step of 1e-4 leaves weights of 0.1 as they are; the message names the way
    out."""
    policy = toys.make("flow")
    policy.net.to(torch.float16)
    sentence = "dtype float16.*dtype=float32 with train.precision=fp16.*lora"
    with pytest.raises(UserError, match=sentence):
        make_trainer(policy=policy)


def test_adapters_on_half_precision_weights_and_their_average_are_float32():
    """The average of a slow decay moves by a thousandth of a small step, which bfloat16 would round
    away."""
    policy = toys.ToyFlow(lora=Lora(2, targets=["0", "2"]))
    for p in policy.net.parameters():
        p.data = p.data if p.requires_grad else p.data.to(torch.bfloat16)
    weights = make_trainer(policy=policy, ema=0.999).policy.weights
    before = weights.full("ema")
    with torch.no_grad():
        for p in weights.parameters().values():
            p.add_(1e-3)
    weights.track("ema", 0.999)
    after = weights.full("ema")
    assert len(after) == 4 and all(value.dtype == torch.float32 for value in after.values())
    assert not any(torch.equal(value, before[name]) for name, value in after.items())


class Expert(torch.nn.Linear):
    """Counts its rows."""

    config = SimpleNamespace(out_channels=2)
    _no_split_modules = ["Linear"]
    rows = 0

    def forward(self, hidden_states, timestep, return_dict, **cond):
        self.rows += len(hidden_states)
        return (hidden_states * self.weight,)


def test_alone_an_expert_that_a_pass_does_not_need_is_not_run():
    """Nor does it have a gradient, so the optimizer leaves it as it is."""
    high, low = Expert(1, 1), Expert(1, 1)
    experts = Experts(high, low, 500)
    experts(torch.ones(3, 2, 1, 2, 2), torch.tensor([900.0, 800.0, 700.0])).sum().backward()
    assert (high.rows, low.rows) == (3, 0) and low.weight.grad is None
    assert high.weight.grad is not None and experts._no_split_modules == ["Linear"]
