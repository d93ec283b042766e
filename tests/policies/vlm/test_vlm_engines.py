"""Engines that sample by themselves: what they are asked, how far they are from the policy, and the
correction."""

import importlib.machinery
import sys

import pytest
import torch

from mmrl.config.options import TrainOptions
from mmrl.core.errors import UserError
from mmrl.core.types import Rewards
from mmrl.objectives.importance_sampling import Importance
from mmrl.objectives.policy_gradient import PolicyGradient
from mmrl.train.trainer import Trainer
from tests.fixtures import fake_vllm
from tests.policies.vlm.test_vlm_policy import logprobs, point_of, policy_of, prompts, quiet, rolled  # noqa: F401


@pytest.fixture
def vllm(monkeypatch):
    found = fake_vllm.module()
    found.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", found)
    return found


def shaken(policy, by=0.02):
    with torch.no_grad():
        for p in policy.net.parameters():
            if p.requires_grad:
                p.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(5)))


def test_vllm_is_asked_with_the_weights_of_now_and_its_log_probs_are_kept(vllm):
    one = policy_of(engine="vllm", temperature=0.8, top_k=20, stop=["e"])
    assert any("engine/gap" in note for note in one.notes)
    for weights in ("first", "changed"):
        rollout = rolled(one, copies=2)
        gap = (rollout.provenance.sampler_logprob - rollout.logprob)[rollout.mask].abs()
        assert gap.max() < 2e-5 and one.measures()["engine/gap"] == pytest.approx(float(gap.mean()))
        torch.testing.assert_close(
            logprobs(one, rollout).detach(), rollout.logprob, atol=1e-6, rtol=1e-6
        )
        if weights == "first":
            shaken(one)
    calls = ["apply_model", "reset_prefix_cache", "generate", "sleep 1"]
    assert one.outside.llm.calls == [*calls, "wake_up", *calls]
    for text in one.decode(rollout):
        assert "e" not in text[:-1]
    assert not torch.isin(rollout.sample[rollout.mask], torch.tensor(one.inputs.suppressed)).any()
    assert torch.equal(rolled(one, copies=2).sample, rollout.sample), "keyed by the row"


def test_adapters_reach_vllm_merged(vllm):
    one = policy_of(engine="vllm", lora=2)
    shaken(one, 0.1)
    rollout = rolled(one, copies=1)
    assert (rollout.provenance.sampler_logprob - rollout.logprob)[rollout.mask].abs().max() < 2e-5


def test_a_prompt_that_vllm_reads_otherwise_stops_the_run(vllm, monkeypatch):
    one = policy_of(engine="vllm")
    processor = one.outside.llm.processor
    monkeypatch.setattr(
        processor.image_processor, "size", {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 2}
    )
    with pytest.raises(UserError, match="reads this prompt as"):
        rolled(one, prompts()[1:2])


def test_without_vllm_it_says_what_to_install():
    with pytest.raises(UserError, match="pip install vllm"):
        policy_of(engine="vllm")


def test_an_engine_does_not_say_how_sure_the_model_was(vllm):
    with pytest.raises(UserError, match="certainty"):
        rolled(policy_of(engine="vllm", record_self_certainty=True))


def test_continuous_batching_of_texts():
    """Its tokens are its own; what it says of them is what the policy says."""
    one = policy_of(engine="continuous", temperature=0.8, top_k=20, stop=["e"])
    given = [{"text": "hello"}, {"text": "tell me a longer story about it"}]
    state = torch.get_rng_state()
    rollout = rolled(one, given)
    assert torch.equal(torch.get_rng_state(), state)
    gap = (rollout.provenance.sampler_logprob - rollout.logprob)[rollout.mask].abs()
    assert rollout.mask.any(1).all() and gap.max() < 1e-4 and one.measures()["engine/gap"] < 1e-4
    assert all("e" not in text[:-1] for text in one.decode(rollout))
    assert len({tuple(row) for row in rollout.sample.tolist()}) > 2
    with pytest.raises(UserError, match="takes no images"):
        rolled(one)


def test_training_corrects_for_what_the_engine_did_otherwise(vllm):
    """An engine that is off by a factor of 2 in every token: the gap is measured and the weights
    are truncated."""
    one = policy_of(engine="vllm")
    answer = one.outside.answer
    one.outside.answer = lambda *given: [
        said._replace(logprobs=[x - 0.6931472 for x in said.logprobs]) for said in answer(*given)
    ]

    def scorer(media, asked):
        return Rewards({"length": torch.tensor([float(text.count("a")) for text in media])})

    trainer = Trainer(
        one,
        prompts(),
        scorer,
        lambda r, rollout: r.total()[:, None] - 1.0,
        PolicyGradient(importance_sampling=Importance(cap=1.5)),
        lambda p: torch.optim.SGD(p, lr=1e-3),
        TrainOptions(prompts_per_iteration=3, group_size=2, train_batch_size=6, iterations=1),
    )
    found = trainer.iterate()
    assert found["engine/gap"] == pytest.approx(0.6931, abs=1e-3) and found[
        "importance"
    ] == pytest.approx(2, abs=1e-3)
    assert found["ratio/max_deviation"] < 1e-4, (
        "the policy's own log-probs are recorded, not the engine's"
    )
    rollout = rolled(one)
    weight = Importance(cap=1.5).weight(point_of(one, rollout))
    assert torch.equal(weight[rollout.mask], torch.full((int(rollout.mask.sum()),), 1.5))
