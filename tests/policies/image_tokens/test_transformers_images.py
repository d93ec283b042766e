"""Emu3: exact by enumeration on tiny instances of transformers' own class, and equal to its
sampling."""

import warnings

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.zoo.models.image_tokens.emu3 import Emu3
from samplers.noise import Rng
from samplers.warp import Warp
from tests.fixtures.image_tokens import (
    assert_gradient_is_true,
    assert_sampled_is_scored,
    assert_trains,
    every,
    flat_grad,
    logp,
)
from tests.fixtures.tiny_transformers_images import tiny_emu3

PROMPT = {"text": "a red seven"}
PROMPTS = [{"text": "a red seven"}, {"text": "two"}]
IDS = every(3, 4)
REWARD = torch.linspace(-1, 2, len(IDS), dtype=torch.float64).sin()
EMU = {"size": 16, "negative": "ugly, blurred"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("images")
    return {Emu3: str(tiny_emu3(base / "emu3"))}


@pytest.fixture
def make(folders):
    def make(kind, double=True, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = kind(folders[kind], **EMU | options)
        policy.net.to(torch.float64 if double else torch.float32)
        return policy

    return make


MODES = [
    (Emu3, {"guidance_scale": 1.0}),
    (Emu3, {"guidance_scale": 3.0, "temperature": 0.7}),
    (Emu3, {"guidance_scale": 2.0, "top_k": 2}),
]


@pytest.mark.parametrize(("kind", "options"), MODES, ids=str)
def test_probabilities_of_all_images_sum_to_1_and_the_gradient_is_the_true_one(make, kind, options):
    policy = make(kind, **options)
    scores = logp(policy, IDS, PROMPT)
    p = scores.exp()
    if "top_k" in options:  # a token outside the support is scored as if it were inside
        with torch.no_grad():
            rollout = policy.rollout([PROMPT], 300, Rng.of("support"))
        sampled = (rollout.sample[:, None] == IDS).all(2).any(0)
        assert p[sampled].sum() > 0.95 and p.sum() > 1 + 1e-6
        return
    assert abs(p.sum() - 1) < 1e-12 and (p > 0).all()
    assert_gradient_is_true(policy, lambda: logp(policy, IDS, PROMPT), REWARD)


@pytest.mark.parametrize(
    ("kind", "options"), [MODES[0], (Emu3, {"guidance_scale": 4.0, "size": 24})], ids=str
)
def test_token_by_token_is_all_at_once_with_ragged_prompts(make, kind, options):
    """Of Emu3 also with a negative prompt that is longer than one of the prompts, and rows of
    three."""
    policy = make(kind, **options)
    rollout = assert_sampled_is_scored(policy, PROMPTS)
    assert rollout.mask.shape[1] == {16: 4, 24: 9}[options.get("size", 16)] and rollout.mask.all()


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_greedy_emu3_is_that_of_transformers(make, guidance):
    """Rows' ends are forced there by a constraint on the next token, here they are no decisions."""
    policy = make(Emu3, double=False, guidance_scale=guidance, size=24)
    policy.warp = Warp(temperature=0.0)
    hf = policy.net.hf
    net = policy.net
    ours = policy.rollout([PROMPT], 1, Rng.of("greedy")).sample
    ids = policy.encode([PROMPT])[0]["ids"]
    visual = net.visual.tolist()

    def allowed(_, so_far):
        return [net.end] if (len(so_far) - ids.shape[1] + 1) % 4 == 0 else visual

    guided = (
        {"guidance_scale": guidance, "negative_prompt_ids": policy.negative}
        if guidance != 1
        else {}
    )
    theirs = hf.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        prefix_allowed_tokens_fn=allowed,
        eos_token_id=-1,
        pad_token_id=0,
        **guided,
    )[:, ids.shape[1] :]
    assert (
        torch.equal(net.visual[ours].view(3, 3), theirs.view(3, 4)[:, :3])
        and (theirs.view(3, 4)[:, 3] == net.end).all()
    )
    # end of file, of image and of sequence, which its decoder cuts off
    tail = torch.zeros(1, 3, dtype=torch.long)
    pixels = hf.decode_image_tokens(image_tokens=torch.cat([theirs, tail], 1), height=3, width=3)
    mean = torch.tensor([0.5, 0.4, 0.5])[:, None, None]
    std = torch.tensor([0.5, 0.5, 0.6])[:, None, None]
    images = policy.decode(policy.rollout([PROMPT], 1, Rng.of("greedy")))
    torch.testing.assert_close(images, (pixels * std + mean).clamp(0, 1), atol=1e-6, rtol=0)
    assert images.shape == (1, 3, 6, 6)


def test_recomputed_layers_give_the_same_gradient(make):
    plain = make(Emu3)
    again = make(Emu3)
    again.enable_gradient_checkpointing()
    first, second = (flat_grad(p, logp(p, IDS[:9], PROMPT).sum()) for p in (plain, again))
    torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-9)


def test_the_first_ratio_is_one_in_training(make):
    assert_trains(make(Emu3, double=False), PROMPTS)


def test_exports_load_again(make, folders, tmp_path):
    policy = make(Emu3, double=False)
    policy.export(tmp_path / "again")
    again = Emu3(str(tmp_path / "again"), **EMU)
    for key, value in again.net.state_dict().items():
        assert torch.equal(value, policy.net.state_dict()[key]), key


def test_mistakes_are_named(folders, tmp_path):
    with pytest.raises(UserError, match="cannot load it"):
        Emu3(str(tmp_path))
    with pytest.raises(UserError, match="width:height"):
        Emu3(folders[Emu3], ratio="wide")
