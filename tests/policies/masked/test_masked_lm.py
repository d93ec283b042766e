"""Masked language models: blocks, exact likelihoods, rows that do not depend on others."""

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.zoo.models.masked.masked_image_lm import MaskedImageLM
from mmrl.zoo.models.masked.masked_lm import MaskedLM
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.fixtures.tiny_masked_lm import folder
from tests.policies.masked import test_block_causal as block_causal

PROMPTS = [{"text": "a red seven"}, {"text": "a blue two on top of a green nine"}]


def made(**options):
    return MaskedLM(str(folder()), **({"max_new_tokens": 6, "block": 3, "steps": 4} | options))


def rolled(policy, prompts=PROMPTS, copies=3):
    with torch.no_grad():
        rollout = policy.rollout(prompts, copies, Rng.of(0))
    return rollout.replace(advantage=torch.ones(len(rollout), 1))


@pytest.mark.parametrize(
    ("make", "options", "offset"),
    [  # by how far prompts reach into a block, where blocks are counted from their first token
        (made, {}, [0, 0]),
        (made, {"sampler": "maskgit"}, [0, 0]),
        (made, {"guidance_scale": 3.0}, [0, 0]),
        (block_causal.made, {"guidance_scale": 3.0}, [3, 1]),
        (block_causal.made, {"sampler": "threshold", "threshold": 0.2}, [3, 1]),
    ],
)
def test_answers_are_scored_as_they_were_drawn_block_after_block(make, options, offset):
    """A row does not depend on other prompts, and what follows its end is neither read nor trained
    on."""
    policy = make(**options)
    rollout = rolled(policy, copies=12)
    offset = torch.tensor(offset).repeat_interleave(12)
    places = offset[:, None] + torch.arange(policy.length)
    assert torch.equal(rollout.tokens.commit_step // policy.turns, places // policy.block)
    for point in policy.path(rollout):
        logp = policy.dist(point).log_prob(point.target)
        torch.testing.assert_close(logp[point.mask], point.logprob[point.mask], atol=1e-5, rtol=0)
    alone = rolled(policy, PROMPTS[:1], copies=12)
    assert torch.equal(alone.sample, rollout.sample[:12])
    torch.testing.assert_close(alone.logprob, rollout.logprob[:12], atol=1e-5, rtol=0)
    size = policy._size(rollout.sample)
    last = (offset + size - 1) // policy.block
    trained = ((last + 1) * policy.block - offset).clamp_max(policy.length)
    assert torch.equal(rollout.mask.sum(1), trained) or policy.chooses  # draws are decisions too
    assert [text.tokens for text in policy.decode(rollout)] == size.tolist()
    assert not (rollout.sample == policy.mask_id).any()


def test_the_network_sees_prompt_and_answer_in_their_places():
    policy = made()
    ids = torch.tensor([[5, 6, policy.mask_id, 7, 8, 5]])
    cond = policy.encode(PROMPTS)
    for p, text in enumerate(PROMPTS):
        plain = torch.tensor([policy.tokenizer(text["text"]).input_ids + ids[0].tolist()])
        row = {key: value[p : p + 1] for key, value in cond.items()}
        torch.testing.assert_close(
            policy.logits(ids, row), policy.net(plain).logits[:, -6:], atol=1e-5, rtol=0
        )


def test_export_is_loaded_by_transformers(tmp_path):
    from transformers import AutoModelForMaskedLM

    policy = made()
    policy.export(tmp_path)
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy.net.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_prompts_may_be_empty_but_not_longer_than_the_places():
    policy = made()
    assert len(rolled(policy, [{"text": ""}])) == 3
    longest = {"text": "red " * 58}
    assert policy.admit([longest]) == [longest]
    with pytest.raises(UserError, match="its 59 tokens and the 6 .* the model's 64 places"):
        policy.admit([{"text": "red"}, {"text": "red " * 59}])
    with pytest.raises(UserError, match="block 4 must divide max_new_tokens 6"):
        made(block=4)
    with pytest.raises(UserError, match="/nowhere/at/all: AutoConfig cannot load it"):
        MaskedLM("/nowhere/at/all")


# ------------------------------------------------------------------------------------------------
# images as tokens


def pictured(**options):
    codec = str(tiny_diffusers.folder("amused") / "vqvae")
    chosen = {
        "decoder": codec,
        "first": 5,
        "codes": 12,
        "side": 2,
        "steps": 3,
        "prompt": "on {text} top",
        "after": "of",
    }
    return MaskedImageLM(str(folder()), **(chosen | options))


def test_the_network_sees_codes_between_their_marks():
    """Prompt with its text, codes from ``first`` on with the mask token for hidden ones, and what
    follows."""
    policy = pictured()
    ids = torch.tensor([[0, 12, 11, 12]])
    cond = policy.encode(PROMPTS)
    read = policy.tokenizer
    for p, prompt in enumerate(PROMPTS):
        before = read(f"on {prompt['text']} top").input_ids
        mask = read.mask_token_id
        plain = torch.tensor([[*before, 5, mask, 16, mask, *read("of").input_ids]])
        row = {key: cond[key][p : p + 1] for key in ("ids", "size")}
        expected = policy.net(plain).logits[:, len(before) : len(before) + 4, 5:17]
        torch.testing.assert_close(policy.logits(ids, row), expected, atol=1e-5, rtol=0)


def test_ids_of_special_tokens_that_the_tokenizer_lacks_stand_where_their_names_do():
    named = {"<|t2i|>": 3, "<|soi|>": 4}
    policy = pictured(
        prompt="<|t2i|><eos>{text}<eos><|soi|>", after="<|soi|>", special_tokens=named
    )
    ids = policy.encode([{"text": "a red seven"}])["ids"][0].tolist()
    assert ids == [3, policy.tokenizer.eos_token_id, *policy.tokenizer("a red seven").input_ids] + [
        policy.tokenizer.eos_token_id,
        4,
    ]
    assert policy.suffix == [4]


def test_images_are_scored_as_sampled_and_decoded_by_the_codec(tmp_path):
    """Or by a function of one's own."""
    from diffusers import VQModel

    policy = pictured(guidance_scale=3.0, sampler="maskgit")
    rollout = rolled(policy)
    assert rollout.sample.min() >= 0 and rollout.sample.max() < 12
    for point in policy.path(rollout):
        logp = policy.dist(point).log_prob(point.target)
        torch.testing.assert_close(logp[point.mask], point.logprob[point.mask], atol=1e-5, rtol=0)
    codec = VQModel.from_pretrained(tiny_diffusers.folder("amused") / "vqvae")
    ids = rollout.sample.view(-1, 2, 2)
    expected = codec.decode(ids, force_not_quantize=True, shape=(*ids.shape, 4)).sample.clamp(0, 1)
    torch.testing.assert_close(policy.decode(rollout), expected.detach())
    (tmp_path / "codec_of_mine.py").write_text(
        "def build():\n    return lambda ids: ids[:, None].expand(-1, 3, -1, -1) / 11\n"
    )
    own = pictured(decoder=f"{tmp_path}/codec_of_mine.py:build")
    assert torch.equal(own.decode(rollout)[:, 1], ids / 11)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"first": 8}, "the model has the ids 0 to 18, and codes would be 8 to 19"),
        ({"prompt": "<|t2i|>{text}"}, "has no token '<|t2i|>'.*special_tokens"),
        ({"after": "</i>"}, "has no token '</i>'"),
        ({"special_tokens": {"<i>": 19}}, "special_tokens: <i> has the id 19"),
        ({"mask": 19}, "policy option mask: .* ids 0 to 18, not 19"),
        ({"prompt": "draw"}, "must hold {text}"),
        ({"decoder": "/nowhere/at/all"}, "decoder: .* VQModel cannot load it"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        pictured(**options)
