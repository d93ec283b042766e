"""VAR: published names and shapes at full size, its quantiser, exact by enumeration, the published
traps."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from mmrl import advantages
from mmrl.core.errors import UserError
from mmrl.train.minibatches import loss_weights
from mmrl.zoo.advantages import tree_mean
from mmrl.zoo.models.image_tokens.var import VAR, shape_of
from mmrl.zoo.models.image_tokens.var_net import Shape, VARNet
from mmrl.zoo.models.image_tokens.var_vq import VARVQ, Quantizer, shared
from samplers.noise import Rng
from tests.fixtures import published_vq
from tests.fixtures.image_tokens import (
    assert_adapters_are_exported,
    assert_checkpointing_changes_nothing,
    assert_frequencies,
    assert_half_precision,
    assert_importance_weights_are_unbiased,
    assert_only_the_matched_gradient_is_true,
    assert_trains,
    at,
    every,
    flat_grad,
    logp,
    support,
    tiny_var,
)

PROMPT = {"label": 2}
PROMPTS = [{"label": 2}, {"label": 0}]
VOCAB = 2
SIDES = (1, 2)
IDS = every(VOCAB, 5)
REWARD = torch.linspace(-1, 2, len(IDS), dtype=torch.float64).sin()


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folders = {
        sides: tiny_var(tmp_path_factory.mktemp("var"), sides, VOCAB)
        for sides in (SIDES, (1, 2, 3))
    }

    def make(sides=SIDES, double=True, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            policy = VAR(str(folders[sides]), **options)
        kind = torch.float64 if double else torch.float32
        policy.net.to(kind)
        policy.vae.to(kind)
        return policy

    return make


# --------------------------------------------------------------------------------------------------
# checkpoints

SIDES_256 = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16)
SIDES_512 = (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)
SIZES = {  # depth: scales, shared modulation, parameters as published, in millions
    16: (SIDES_256, False, 310),
    36: (SIDES_512, True, 2300),
}


def published(depth, sides, together):
    """Names and shapes of a published checkpoint of VAR (Tian et al. 2024)."""
    c = 64 * depth
    length = sum(side * side for side in sides)
    block = {
        "attn.scale_mul_1H11": (1, depth, 1, 1),
        "attn.q_bias": (c,),
        "attn.v_bias": (c,),
        "attn.zero_k_bias": (c,),
        "attn.mat_qkv.weight": (3 * c, c),
        "attn.proj.weight": (c, c),
        "attn.proj.bias": (c,),
        "ffn.fc1.weight": (4 * c, c),
        "ffn.fc1.bias": (4 * c,),
        "ffn.fc2.weight": (c, 4 * c),
        "ffn.fc2.bias": (c,),
    }
    six = {"weight": (6 * c, c), "bias": (6 * c,)}
    block |= (
        {"ada_gss": (1, 1, 6, c)} if together else {f"ada_lin.1.{k}": v for k, v in six.items()}
    )
    ends = {
        "pos_start": (1, 1, c),
        "pos_1LC": (1, length, c),
        "lvl_1L": (1, length),
        "word_embed.weight": (c, 32),
        "word_embed.bias": (c,),
        "class_emb.weight": (1001, c),
        "lvl_embed.weight": (10, c),
        "head.bias": (4096,),
        "attn_bias_for_masking": (1, 1, length, length),
        "head_nm.ada_lin.1.weight": (2 * c, c),
        "head_nm.ada_lin.1.bias": (2 * c,),
        "head.weight": (4096, c),
    }
    ends |= {f"shared_ada_lin.1.{k}": v for k, v in six.items()} if together else {}
    return ends | {
        f"blocks.{i}.{name}": shape for i in range(depth) for name, shape in block.items()
    }


@pytest.mark.parametrize("depth", [16, 36])
def test_published_transformers_load_strictly_at_full_size(depth):
    sides, together, millions = SIZES[depth]
    state = {
        name: torch.empty(shape, device="meta")
        for name, shape in published(depth, sides, together).items()
    }
    level = torch.arange(10).repeat_interleave(torch.tensor([side * side for side in sides]))
    shape = shape_of(state | {"lvl_1L": level[None]}, "checkpoint")
    assert tuple(shape.sides) == sides and (shape.depth, shape.heads, shape.shared) == (
        depth,
        depth,
        together,
    )
    with torch.device("meta"):
        net = VARNet(shape, None)
    net.load_state_dict(state, strict=True, assign=True)
    assert sum(p.numel() for p in net.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
    assert sum(net.turns) == (2240 if depth == 36 else 680)


def test_the_published_autoencoder_loads_strictly_at_full_size():
    state = {name: torch.empty(shape, device="meta") for name, shape in published_vq.var().items()}
    assert len(state) == 324
    with torch.device("meta"):
        vae = VARVQ.like(state, SIDES_256, "checkpoint")
    vae.load_state_dict(state, strict=True, assign=True)


def test_checkpoints_as_published_are_read(make, tmp_path):
    policy = make(double=False)
    torch.save(policy.net.state_dict(), tmp_path / "var.pth")
    other = policy.vae.state_dict() | {"quantize.ema_vocab_hit_SV": torch.zeros(10, VOCAB)}
    torch.save(other, tmp_path / "vae.pth")
    again = VAR(str(tmp_path / "var.pth"), vae=str(tmp_path / "vae.pth"))
    assert all(
        torch.equal(v, again.net.state_dict()[k]) for k, v in policy.net.state_dict().items()
    )
    with pytest.raises(UserError, match="vae is missing"):
        VAR(str(tmp_path / "var.pth"))
    with pytest.raises(UserError, match="another kind of checkpoint"):
        VAR(str(tmp_path / "vae.pth"), vae=str(tmp_path / "vae.pth"))


# -------------------------------------------------------------------------------------------------
# the quantiser


def test_a_checkpoint_of_the_published_training_holds_both(tmp_path):
    from safetensors.torch import load_file

    folder = tiny_var(tmp_path / "var", SIDES, VOCAB)
    var, vae = (load_file(folder / f"{name}.safetensors") for name in ("var", "vae"))
    both = {"config": {}, "var_wo_ddp": var, "vae_local": vae, "var_opt": {}}
    file = tmp_path / "ar-ckpt-best.pth"
    torch.save({"epoch": 1, "iter": 0, "trainer": both, "args": {"depth": 16}}, file)
    policy = VAR(str(file), vae=str(file))
    for net, published_state in ((policy.net, var), (policy.vae, vae)):
        for name, value in published_state.items():
            if name == "quantize.ema_vocab_hit_SV":  # counts of training, of its scales
                continue
            torch.testing.assert_close(net.state_dict()[name], value, atol=0, rtol=0)


def test_the_shared_convolutions_of_ten_scales_are_those_of_float64():
    """In float32 ties fall elsewhere and images degrade silently, in VAR's published quantiser
    (Tian et al. 2024)."""
    assert shared(10) == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]


def test_an_image_is_the_sum_of_its_scales(make):
    quantizer = make((1, 2, 3)).vae.quantize
    ids = every(2, 14)[1234:1237]
    f = quantizer.blank(3)
    expected = 0
    for k, (part, side) in enumerate(zip(quantizer.split(ids), quantizer.sides, strict=True)):
        f = quantizer.add(f, part, k)
        h = quantizer.embedding.weight[part].permute(0, 2, 1).reshape(3, -1, side, side)
        h = F.interpolate(h, size=(3, 3), mode="bicubic") if side < 3 else h
        conv = quantizer.quant_resi.qresi_ls[[0, 2, 3][k]]
        expected = expected + 0.5 * h + 0.5 * F.conv2d(h, conv.weight, conv.bias, padding=1)
        torch.testing.assert_close(f, expected, atol=1e-12, rtol=0)
    # area averages
    torch.testing.assert_close(quantizer.at_scale(f, 0)[:, 0], f.mean((2, 3)), atol=1e-12, rtol=0)


def test_encoding_takes_the_nearest_entries_scale_by_scale(make):
    vae = make((1, 2, 3)).vae
    images = Rng.of("image").normal(torch.arange(2), (3, 6, 6), dtype=torch.float64)
    ids = vae.encode(images)
    rest = vae.quant_conv(vae.encoder(images))
    first = vae.quantize.embedding.weight - rest.mean((2, 3))[:, None]  # [B, V, D]
    assert torch.equal(ids[:, 0], first.square().sum(-1).argmin(-1))
    assert (
        ids.shape == (2, 14)
        and vae.decode(ids).shape == (2, 3, 6, 6)
        and vae.decode(ids).abs().max() <= 1
    )


# --------------------------------------------------------------------------------------------------
# exactness

MODES = [
    {"guidance_scale": 1.0},
    {"guidance_scale": 4.0},
    {"guidance_scale": 3.0, "temperature": 0.7},
]


@pytest.mark.parametrize("options", MODES[1:], ids=str)
def test_probabilities_of_all_images_sum_to_1(make, options):
    with torch.no_grad():
        p = logp(make(**options), IDS, PROMPT).exp()
    assert abs(p.sum() - 1) < 1e-12 and (p > 0).all()


@pytest.mark.parametrize(
    "options", [{"guidance_scale": 3.0, "top_k": 1}, {"guidance_scale": 4.0, "top_p": 0.7}], ids=str
)
def test_probabilities_of_what_can_be_sampled_sum_to_1(make, options):
    policy = make(**options)
    with torch.no_grad():
        p = logp(policy, IDS, PROMPT).exp()
        possible = support(policy, IDS, PROMPT)
        drawn = policy.rollout([PROMPT], 20, Rng.of("warped"))
    assert 1 <= possible.sum() < len(IDS) and abs(p[possible].sum() - 1) < 1e-12
    found = (drawn.sample[:, None] == IDS[possible]).all(2)  # [20, possible]
    torch.testing.assert_close(drawn.logprob.sum(1).exp(), p[possible][found.long().argmax(1)])
    assert found.any(1).all()


@pytest.mark.parametrize(("sides", "guidance"), [(SIDES, 1.0), ((1, 2, 3), 4.0)])
def test_scale_by_scale_is_all_at_once(make, sides, guidance):
    policy = make(sides, guidance_scale=guidance)
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 3, Rng.of("once"))
        (point,) = policy.path(rollout)
        again = policy.dist(point).log_prob(point.target)
    torch.testing.assert_close(again, rollout.logprob, atol=1e-11, rtol=0)
    assert rollout.tokens.commit_step[0].tolist() == [
        k for k, side in enumerate(sides) for _ in range(side * side)
    ]


def test_samples_come_at_the_rate_of_their_score(make):
    policy = make(guidance_scale=3.0)
    copies = 1000
    with torch.no_grad():
        rollout = policy.rollout([PROMPT], copies, Rng.of("frequencies"))
        p = logp(policy, IDS, PROMPT).exp()
    counts = torch.bincount(
        (rollout.sample * 2 ** torch.arange(4, -1, -1)).sum(1), minlength=len(IDS)
    )
    assert_frequencies(counts, p, copies)


def test_guidance_grows_from_none_at_the_first_scale(make):
    """z = (1 + t) z_c - t z_u with t = cfg k / (K - 1), cfg = guidance - 1."""
    policy = make((1, 2, 3), guidance_scale=5.0)
    assert policy.scales(5.0).tolist() == [1.0] + [3.0] * 4 + [5.0] * 9
    ids = every(2, 14)[777:779]
    inputs = policy.collate(policy.encode(PROMPTS))
    with torch.no_grad():
        z, z_empty = (
            policy.net.vocabulary(policy.net.teach(i, ids)) for i in (inputs, policy.empty(inputs))
        )
        t = 4 * torch.tensor([0.0] + [0.5] * 4 + [1.0] * 9, dtype=torch.float64)[:, None]
        expected = ((1 + t) * z - t * z_empty).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        point = at(policy, ids, PROMPTS[0]).replace(
            cond=policy.encode(PROMPTS), group=torch.tensor([0, 1])
        )
        torch.testing.assert_close(policy.dist(point).log_prob(ids), expected, atol=1e-12, rtol=0)


def test_a_token_changes_later_scales_only(make):
    policy = make((1, 2, 3), guidance_scale=1.0)
    inputs = policy.collate(policy.encode([PROMPT]))
    ids = every(2, 14)[4321:4322]
    with torch.no_grad():
        before = policy.net.teach(inputs, ids)
        for place, first in ((0, 1), (2, 5), (9, 14)):
            other = ids.clone()
            other[0, place] ^= 1
            moved = (policy.net.teach(inputs, other) - before).abs().amax(-1)[0]
            assert moved[:first].max() == 0 and (moved[first:] > 0).all()


def test_no_label_is_dropped(make):
    """The published forward pass drops one label in ten, in evaluation too: log-probs would be
    random."""
    policy = make()
    state = torch.get_rng_state()
    found = {tuple(logp(policy, IDS[:3], PROMPT).tolist()) for _ in range(30)}
    assert len(found) == 1 and torch.equal(torch.get_rng_state(), state)
    assert found != {tuple(logp(policy, IDS[:3], PROMPTS[1]).tolist())}


def test_the_matched_gradient_is_the_true_one_and_the_published_is_not(make):
    assert_only_the_matched_gradient_is_true(make, IDS, REWARD, PROMPT, below=0.9999)


def test_importance_weights_are_unbiased(make):
    policy = make(guidance_scale=2.0)
    assert_importance_weights_are_unbiased(
        policy, lambda: logp(policy, IDS, PROMPT), REWARD, within=1e-10
    )


# --------------------------------------------------------------------------------------------------
# training


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_scales_are_weighed(make, alpha):
    """alpha 0 is the sum over tokens, alpha 1 the sum of the scales' means."""
    policy = make((1, 2, 3), scale_alpha=alpha)
    (point,) = policy.path(policy.rollout(PROMPTS, 2, Rng.of("weights")))
    found = loss_weights(point, "token_mean", 1)
    each = torch.tensor([1.0] + [4.0] * 4 + [9.0] * 9)
    torch.testing.assert_close(found, (each**-alpha).expand(4, -1), atol=1e-6, rtol=0)
    if alpha == 1:
        torch.testing.assert_close(found.sum(1), torch.full((4,), 3.0))


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_the_first_ratio_is_one_in_training(make, alpha):
    assert_trains(make(double=False, guidance_scale=3.0, scale_alpha=alpha), PROMPTS)


def test_half_precision(make):
    assert_half_precision(make(double=False, guidance_scale=3.0), PROMPTS, apart=2e-2)


def test_a_scale_is_not_compiled_as_a_token(make):
    with pytest.raises(UserError, match="many tokens in a pass"):
        make(compile=True)


def test_scoring_with_gradient_checkpointing_is_the_same(make):
    assert_checkpointing_changes_nothing(make, IDS[:9], PROMPT)


def test_shared_modulation_is_the_sum_of_both_parts():
    """d36: a block's own six vectors plus those that one layer makes for all."""
    shape = Shape(8, 1, 2, (1, 2), 2, 4, 3, 16, shared=True)
    net = VARNet(shape, Quantizer(2, 4, (1, 2))).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(
                Rng.of("shared", i).normal(torch.zeros(1), (p.numel(),), dtype=p.dtype).view_as(p)
            )
    net.outside[0].double()
    inputs = {"label": torch.tensor([1])}
    before = net.teach(inputs, IDS[3:4])
    with torch.no_grad():
        six = net.shared_ada_lin[1]
        net.blocks[0].ada_gss += six.bias.view(1, 1, 6, 8)
        six.bias.zero_()
    torch.testing.assert_close(net.teach(inputs, IDS[3:4]), before, atol=1e-10, rtol=0)


def test_adapters_are_added_to_what_is_exported(make, tmp_path):
    policy = make(double=False, lora=2)
    assert_adapters_are_exported(VAR, policy, IDS, PROMPT, tmp_path)


# --------------------------------------------------------------------------------------------------
# branching


@pytest.mark.parametrize(
    "options",
    [
        {"guidance_scale": 1.0},
        {"guidance_scale": 3.0, "top_k": 2},
        {"logprob_guidance": "conditional"},
    ],
)
def test_images_that_branch_are_those_that_go_on_from_a_common_beginning(make, options):
    """Shared scales are computed once; the row they belong to is the one it would be alone; the
    others are scored, all of their decisions, as if each had been drawn in full."""
    tree = make((1, 2, 3), branch_at=2, branches=3, **options)
    flat = make((1, 2, 3), **options)
    rollout, alone = (one.rollout(PROMPTS, 6, Rng.of("branch")) for one in (tree, flat))
    # of scales 1, 4 and 9
    rows = torch.arange(12)
    scale = torch.arange(14) >= 5
    assert torch.equal(rollout.sample[::3], alone.sample[::3])
    assert torch.equal(rollout.sample[:, ~scale], alone.sample[::3, ~scale].repeat_interleave(3, 0))
    assert len(rollout.sample[:6].unique(dim=0)) > 2
    assert torch.equal(rollout.mask, scale | (rows % 3 == 0)[:, None])
    assert torch.equal(
        rollout.edge_id, torch.where(scale, rows[:, None], (rows - rows % 3)[:, None])
    )
    (point,) = flat.path(rollout.replace(mask=torch.ones_like(rollout.mask)))
    with torch.no_grad():
        torch.testing.assert_close(
            flat.dist(point).log_prob(point.target), rollout.logprob, atol=1e-12, rtol=0
        )
    passes = 1 + (options.get("guidance_scale") != 1)
    assert tree.report.forwards == passes * (4 + 4 + 12) and alone.edge_id is None


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_the_gradient_of_branches_is_the_average_of_samples(make, alpha):
    tree = make((1, 2, 3), branch_at=2, branches=2, guidance_scale=2.0, scale_alpha=alpha)
    flat = make((1, 2, 3), guidance_scale=2.0, scale_alpha=alpha)
    reward = torch.linspace(0, 3, 8, dtype=torch.float64).cos()
    rollout = tree.rollout(PROMPTS, 4, Rng.of("tree"))

    def gradient(policy, rollout, advantage):
        (point,) = policy.path(rollout.replace(advantage=advantage.double()))
        loss = -point.advantage * policy.dist(point).log_prob(point.target)
        return flat_grad(policy, (loss * loss_weights(point, "token_sum", 1)).sum())

    found = gradient(tree, rollout, tree_mean(reward, rollout, base=advantages.dr_grpo))
    rows = rollout.replace(mask=torch.ones_like(rollout.mask), edge_id=None)
    wanted = gradient(flat, rows, advantages.dr_grpo(reward, rows))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-9)
    assert wanted.abs().max() > 0.01


def test_branches_fit_the_copies_and_the_scales(make):
    with pytest.raises(UserError, match="multiple of it"):
        make(branch_at=1).rollout([PROMPT], 3, Rng.of("odd"))
    with pytest.raises(UserError, match="this model has 2 scales"):
        make(branch_at=2)
