"""``block_causal``: LLaDA2's blocks, against diffusers' LLaDA2Pipeline, with a model that brings
its own code."""

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from torch import nn

from mmrl.core.errors import UserError
from mmrl.core.registry import ESTIMATORS
from mmrl.policies.lora import Lora, add_lora
from mmrl.policies.masked import policy as masked
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from mmrl.zoo.objectives import Masked
from samplers.noise import Rng
from tests.fixtures.tiny_block_lm import BLOCK, folder

# 3, 9 and 4 tokens: two prompts end inside a block, one at its end
PROMPTS = [
    {"text": "a red seven"},
    {"text": "a blue two on top of a green nine"},
    {"text": "a green nine on"},
]
LENGTH = 8


def made(**options):
    chosen = {"max_new_tokens": LENGTH, "block": BLOCK, "steps": 4, "remote_code": True}
    return MaskedLM(str(folder()), **(chosen | {"block_causal": True} | options))


def rolled(policy, prompts=PROMPTS, copies=3):
    with torch.no_grad():
        return policy.rollout(prompts, copies, Rng.of(0))


def pipeline(policy):
    scheduler = BlockRefinementScheduler(block_length=BLOCK)
    pipe = LLaDA2Pipeline(model=policy.net, scheduler=scheduler, tokenizer=policy.tokenizer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def answered(pipe, prompt, **options):
    return pipe(
        prompt=prompt["text"],
        gen_length=LENGTH,
        block_length=BLOCK,
        num_inference_steps=2,
        editing_threshold=None,
        eos_early_stop=False,
        output_type="seq",
        callback_on_step_end_tensor_inputs=["block_x", "sampled_tokens", "sampled_probs"],
        **options,
    ).sequences


@pytest.mark.parametrize("look", [BLOCK, 64], ids=["block causal", "both ways"])
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: str(len(prompt["text"].split())))
def test_what_the_pipeline_draws_has_its_probability_and_a_threshold_keeps_the_same(prompt, look):
    """At every state that the pipeline passes through; also where the model itself would look
    beyond the block that is being written."""
    policy = made(sampler="threshold", threshold=0.3)
    policy.net.config.block = look
    cond = policy.encode([prompt])
    size = int(cond["size"])
    seen = []

    def kept(pipe, step, time, values):
        seen.append((time, {name: value.clone() for name, value in values.items()}))
        return values

    torch.manual_seed(1)
    options = {"temperature": 1.0, "sampling_method": "multinomial", "threshold": 0.3}
    answered(pipeline(policy), prompt, callback_on_step_end=kept, **options)
    passes = 0
    blocks = -(-(size + LENGTH) // BLOCK)
    state = torch.full((1, blocks * BLOCK), policy.mask_id)
    state[0, :size] = cond["ids"][0, :size]
    for time, values in seen:
        end = values["block_x"].shape[1]
        first = end - BLOCK
        hidden = state[:, first:end] == policy.mask_id
        confidence = values["sampled_probs"].log()
        logits = policy.logits(state[:, size : size + LENGTH], cond).log_softmax(-1)
        for place in range(max(first, size), min(end, size + LENGTH)):
            if hidden[0, place - first]:
                token = int(values["sampled_tokens"][0, place - first])
                logprob = logits[0, place - size, token]
                expected = confidence[0, place - first]
                torch.testing.assert_close(logprob, expected, atol=1e-5, rtol=1e-5)
        if hidden.any():
            rank = policy._reveal(time, confidence, hidden, None)
            after = values["block_x"][:, first:end]
            assert torch.equal((rank < policy.length) & hidden, hidden & (after != policy.mask_id))
            passes += 1
        state[:, :end] = values["block_x"]
    assert passes < 2 * (blocks - size // BLOCK)  # some were sure at once


def test_likeliest_tokens_are_those_of_the_pipeline(monkeypatch):
    """MaskGIT without noise is the pipeline's rule with a threshold that nothing reaches."""
    policy = made(sampler="maskgit", schedule="linear", choice=[1e-9, 0.0])

    def likeliest(logits, uniform):
        token = logits.argmax(-1)[:, None].expand(-1, uniform.shape[1])
        return token, None

    monkeypatch.setattr(masked, "drawn", likeliest)
    monkeypatch.setattr(policy, "_warped", lambda logits: logits)
    policy.end = None
    rollout = rolled(policy, copies=1)
    for prompt, ids in zip(PROMPTS, rollout.sample, strict=True):
        expected = answered(
            pipeline(policy), prompt, temperature=0.0, sampling_method="greedy", threshold=2.0
        )
        assert torch.equal(ids, expected[0])


def test_answers_of_others_are_revealed_in_blocks_of_their_prompts():
    policy = made()
    rollout = policy.demonstrate(PROMPTS, ["a red one", "two", None], Rng.of(1))
    offset = torch.tensor([3, 1, 0])[:, None]
    assert torch.equal(rollout.tokens.commit_step // 2, (offset + torch.arange(LENGTH)) // BLOCK)
    assert rollout.logprob[rollout.mask].isfinite().all() and not rollout.mask[2].any()


def test_what_only_the_sampler_can_score_or_code_may_run_is_refused():
    with pytest.raises(UserError, match="remote_code"):
        made(remote_code=False)
    policy = made()
    rollout = rolled(policy).replace(advantage=torch.ones(9, 1))
    with pytest.raises(UserError, match="block_causal: .* estimator: trajectory"):
        list(Masked(estimator=ESTIMATORS["d1"]).points(policy, rollout, Rng.of(1)))


def test_adapters_lie_on_the_attention_of_llada2():
    """Whose code computes queries, keys and values by one layer."""
    attention = {"query_key_value": nn.Linear(4, 6), "dense": nn.Linear(4, 4)}
    parts = {"attention": nn.ModuleDict(attention), "dense": nn.Linear(4, 4)}
    net = nn.ModuleDict({"layer": nn.ModuleDict(parts)})
    add_lora(net, Lora(2), MaskedLM.attention)
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all(name.startswith("layer.attention.") for name in trained)
