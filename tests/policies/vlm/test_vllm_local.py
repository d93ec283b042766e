"""The engine vllm in this process, with the real vLLM: its log-probs are the policy's."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from mmrl.core.errors import UserError
from mmrl.policies.vlm.engines.vllm_options import VLLMOptions
from mmrl.policies.vlm.policy import VLM
from tests.fixtures import tiny_vlms, vllm_models
from tests.policies.vlm.test_vlm_policy import logprobs, prompts, rolled

pytestmark = vllm_models.marks
SMALL = {"enforce_eager": True, "max_model_len": 1024, "gpu_memory_utilization": 0.1}
NEAR = 2e-5  # largest seen: 2e-6 of whole weights, 6e-5 of adapters that are as large as weights


def policy_of(sync="weights", name="wide_qwen2_5_vl", **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return VLM(
            str(vllm_models.folder(name)),
            engine="vllm",
            **{"vllm": VLLMOptions(sync=sync, **SMALL), "max_new_tokens": 8}
            | {"coordinate_space": "original", "temperature": 0.8}
            | options,
        )


@pytest.fixture(scope="module")
def policy():
    return policy_of(top_k=20, stop=["e"])


@torch.no_grad()
def shake(policy, by=0.02, seed=5):
    for p in policy.net.parameters():
        if p.requires_grad:
            p.add_(by * torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))


def gap(rollout):
    return (rollout.provenance.sampler_logprob - rollout.logprob)[rollout.mask].abs().max()


def video(frames, width, height):
    return [{"text": "what happens?", "video": tiny_vlms.video(frames, width, height), "fps": 2.0}]


def test_texts_and_images_have_the_policys_log_probs_before_and_after_an_update(policy):
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    samples = []
    for _ in range(2):
        rollout = rolled(policy, copies=2)  # one image; two images; none
        measures = policy.measures()
        assert gap(rollout) < NEAR and measures["engine/gap"] < NEAR
        assert 0 < measures["time/sync_share"] < 1 and measures["time/sync"] > 0
        scored = logprobs(policy, rollout).detach()
        torch.testing.assert_close(scored, rollout.logprob, atol=1e-6, rtol=1e-6)
        assert torch.equal(rolled(policy, copies=2).sample, rollout.sample), "keyed by the row"
        samples.append(rollout.sample)
        shake(policy)
    assert not torch.equal(*samples)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is not drawn from"
    assert torch.get_num_threads() == threads
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"


def test_an_answer_ends_where_the_policy_ends_it(policy):
    rollout = rolled(policy, copies=4)
    for text, tokens in zip(policy.decode(rollout), rollout.mask.sum(1).tolist(), strict=True):
        assert "e" not in text[:-1] and 0 < tokens <= 8
    suppressed = torch.tensor(policy.inputs.suppressed)
    assert not torch.isin(rollout.sample[rollout.mask], suppressed).any()
    policy.set_max_new_tokens(3)
    assert rolled(policy, copies=2).mask.sum(1).max() <= 3
    policy.set_max_new_tokens(8)
    with policy.evaluating():
        greedy = rolled(policy, copies=2)
    assert torch.equal(greedy.sample[::2], greedy.sample[1::2])


def test_videos_have_the_policys_log_probs(policy):
    assert gap(rolled(policy, video(4, 140, 28), copies=2)) < NEAR


def test_a_prompt_that_vllm_reads_otherwise_stops_the_run(policy, monkeypatch):
    engine_prompt = policy.inputs.engine_prompt

    def shortened(prompt):
        made = engine_prompt(prompt)
        return type(made)(made.name, made.ids, made.read[:-1], made.images, made.videos)

    monkeypatch.setattr(policy.inputs, "engine_prompt", shortened)
    with pytest.raises(UserError, match="reads this prompt as"):
        rolled(policy, prompts()[1:2])


def test_adapters_alone_travel_and_one_takes_the_place_of_the_other():
    adapted = policy_of(sync="lora", lora=2)
    samples = []
    for _ in range(3):
        rollout = rolled(adapted, copies=1)
        assert gap(rollout) < 1e-4
        samples.append(rollout.sample)
        shake(adapted, 0.03)
    assert not torch.equal(samples[0], samples[1]) and not torch.equal(samples[1], samples[2])
    assert len(list(adapted.outside.folder.iterdir())) == 1, "only the adapter of now is on disk"
    assert adapted.outside.llm.llm_engine.list_loras() == {adapted.outside.adapter.lora_int_id}


def test_a_model_that_vllm_cannot_load_is_refused_before_ours_is(monkeypatch):
    """Heads 8 wide, for which its attention on CPUs has no kernel; a family that it does not
    know."""
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", None)
    for family, words in (("qwen2_5_vl", "head_dim=8"), ("mllama", "MllamaProcessor")):
        place = str(tiny_vlms.folder(family))
        with pytest.raises(UserError, match=f"vLLM cannot load {place}: .*{words}"):
            VLM(place, engine="vllm", vllm=VLLMOptions(**SMALL))


def test_a_head_tied_to_the_embeddings_follows_them():
    # the last test: vLLM has one engine's groups a process, and they end with this one;
    # its share of the memory counts what this process, with other policies, has already
    vllm = VLLMOptions(**SMALL | {"gpu_memory_utilization": 0.2})
    policy = policy_of(name="tied_qwen2_5_vl", vllm=vllm)
    hf = policy.net.hf
    assert hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
    for _ in range(2):
        assert gap(rolled(policy, copies=2)) < NEAR
        shake(policy)
