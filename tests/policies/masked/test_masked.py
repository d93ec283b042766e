"""Masked diffusion: aMUSEd equals its pipeline, and likelihoods of trajectories are exact by
enumeration."""

import itertools
from functools import partial

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.masked.policy import MaskedDiffusion, alike
from mmrl.zoo.models.diffusion.sd3 import SD3
from mmrl.zoo.models.masked.amused import Amused
from mmrl.zoo.models.masked.uvit import asking, share_texts
from samplers import unmask
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.fixtures.records import make_rollout

TEXTS = ["a red seven", "a blue two"]
PROMPTS = [{"text": text} for text in TEXTS]


def amused(double=True, folder="amused", **options):
    policy = Amused(str(tiny_diffusers.folder(folder)), **{"steps": 3} | options)
    with torch.no_grad():
        for p in policy.net.parameters():
            p.mul_(1.5)  # far from uniform
    if double:
        policy.net.double()
    return policy


def flat_grad(policy, loss):
    policy.net.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.net.parameters() if p.grad is not None])


@pytest.mark.parametrize(("length", "steps"), [(16, 3), (256, 12), (4, 8), (5, 1)])
def test_tokens_left_hidden_are_the_schedulers(length, steps):
    from diffusers import AmusedScheduler

    scheduler = AmusedScheduler(mask_token_id=9)
    scheduler.set_timesteps(steps)
    ids = torch.full((1, length), 9)
    found = [length]
    for t in scheduler.timesteps:
        ids = scheduler.step(
            torch.zeros(1, length, 4), t, ids, generator=torch.Generator()
        ).prev_sample
        found.append(int((ids == 9).sum()))
    assert unmask.left_hidden(length, unmask.cosine(steps)) == found


@pytest.mark.parametrize(("guidance", "choice"), [(1.0, (2.0, 0.0)), (3.0, (0.5, 0.1))])
def test_maskgit_is_the_pipeline(guidance, choice, monkeypatch):
    """Tokens equal and pixels too, where both get the same uniform numbers."""
    from diffusers import AmusedPipeline
    from diffusers.schedulers import scheduling_amused

    path = str(tiny_diffusers.folder("amused"))
    policy = amused(False, steps=5, sampler="maskgit", guidance_scale=guidance, choice=choice)
    rng = Rng.of("parity")
    row = torch.arange(2)
    step = iter(range(100))
    with torch.no_grad():
        ours = policy.rollout(PROMPTS, 1, rng)
    pipe = AmusedPipeline.from_pretrained(path, transformer=policy.net)
    pipe.set_progress_bar_config(disable=True)

    def multinomial(p, n, generator=None):
        u = rng.uniform(row, (16,), next(step)).flatten()[:, None]
        return (p.double().cumsum(-1) <= u).sum(-1, keepdim=True)

    def noise(t, generator=None):
        return unmask.gumbel(rng.uniform(row, (16,), next(step)))

    monkeypatch.setattr(torch, "multinomial", multinomial)
    monkeypatch.setattr(scheduling_amused, "gumbel_noise", noise)
    options = {"num_inference_steps": 5, "guidance_scale": guidance, "temperature": choice}
    tokens = pipe(TEXTS, output_type="latent", **options).images
    assert torch.equal(tokens.flatten(1), ours.sample)
    step = iter(range(100))
    pixels = pipe(TEXTS, output_type="pt", **options).images
    torch.testing.assert_close(policy.decode(ours), pixels, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lora", [None, 2])
def test_export_is_loaded_by_the_pipeline(lora, tmp_path):
    from diffusers import AmusedPipeline

    policy = Amused(path := str(tiny_diffusers.folder("amused")), steps=3, lora=lora)
    with torch.no_grad():
        for p in policy.weights.parameters().values():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        rollout = policy.rollout(PROMPTS, 2, Rng.of(0))
    policy.export(tmp_path)
    pipe = AmusedPipeline.from_pretrained(path if lora else tmp_path)
    if lora:
        pipe.transformer.load_lora_adapter(
            tmp_path, prefix=None, weight_name="pytorch_lora_weights.safetensors"
        )
    point = next(iter(policy.path(rollout)))
    expected = policy.dist(point).logits
    policy.net = policy.trained = pipe.transformer.eval()
    share_texts(policy.net, "sdpa")
    with torch.no_grad():
        torch.testing.assert_close(policy.dist(point).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["guided", "guided_stopgrad_uncond"])
def test_asking_for_some_places_is_a_part_of_all_also_of_recomputed_layers(kind):
    """Shared texts, logits of some tokens and the mixture before the codebook give the same,
    gradient too."""
    policy = amused(guidance_scale=3.0, logprob_guidance=kind)
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 3, Rng.of(0))
    point = list(policy.path(rollout))[1]
    assert 0 < point.mask.sum() < point.mask.numel()
    found = []
    for places in (policy.places, partial(MaskedDiffusion.places, policy)):
        policy.places = places
        logp = policy.dist(point).log_prob(point.target)
        found.append((logp.detach(), flat_grad(policy, logp.sum())))
        policy.enable_gradient_checkpointing()
    # norms are in float32 throughout
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("order", [[0, 0, 1, 1], [2, 0, 3, 1]])
@torch.no_grad()
def test_the_quickened_network_is_that_of_diffusers(order):
    """All weights random, those too that begin at 0: all logits, and guided ones of some places by
    shared texts, whose rows lie side by side or not."""
    from diffusers import UVit2DModel

    path = str(tiny_diffusers.folder("amused"))
    net = Amused(path).net.double()
    plain = UVit2DModel.from_pretrained(path, subfolder="transformer").double()

    def normal(name, rows, *shape):
        return Rng.of(name).normal(torch.arange(rows), shape, dtype=torch.float64)

    for i, (ours, theirs) in enumerate(zip(net.parameters(), plain.parameters(), strict=True)):
        theirs.add_(0.3 * normal(f"quick {i}", 1, ours.numel()).view_as(ours))
        ours.copy_(theirs)
    side = plain.config.sample_size
    rows = torch.tensor(order)
    where = Rng.of("where").uniform(torch.arange(2), (16,)) < 0.4
    where[:, 3] = True
    shown = Rng.of("ids").uniform(torch.arange(2), (side, side)) * plain.config.vocab_size
    ids = shown.long().repeat(2, 1, 1)
    text = normal("text", max(order) + 1, 5, plain.config.encoder_hidden_size)
    pooled = normal("pool", max(order) + 1, plain.config.cond_embed_dim)[rows]
    micro = torch.tensor([[16, 16, 0, 0, 6.0]]).double().expand(4, -1)
    wanted = plain(ids, text[rows], pooled, micro)
    torch.testing.assert_close(net(ids, text[rows], pooled, micro), wanted, atol=1e-5, rtol=1e-6)
    flat = wanted.flatten(2).transpose(1, 2)
    mixed = (flat[2:] + 3 * (flat[:2] - flat[2:]))[where]
    with asking(net, where, 3.0):
        found = net(ids, text, pooled, micro, cross_attention_kwargs={"rows": rows})
    torch.testing.assert_close(found, mixed, atol=1e-5, rtol=1e-5)


def test_the_first_pass_looks_at_one_image_a_prompt(monkeypatch):
    policy = amused(False, guidance_scale=2.0)
    rows = []
    places = policy.places
    monkeypatch.setattr(
        policy, "places", lambda ids, *given: rows.append(len(ids)) or places(ids, *given)
    )
    with torch.no_grad():
        together = policy.rollout(PROMPTS, 3, Rng.of(0))
        policy.pass_sizes.rows = 4  # chunks that cut groups apart
        apart = policy.rollout(PROMPTS, 3, Rng.of(0))
    assert (
        rows == [2 * 2, 2 * 6, 2 * 6, 2 * 4, 2 * 4, 2 * 4, 2 * 1, 2 * 2, 2 * 2]
        and alike(together.group) == 3
    )
    assert torch.equal(together.sample, apart.sample)
    torch.testing.assert_close(together.logprob, apart.logprob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", ["emerge", "maskgit", "threshold"])
def test_states_of_the_path_are_those_that_were_visited(sampler, monkeypatch):
    policy = amused(False, steps=4, sampler=sampler)
    seen = []
    drawn = policy._drawn
    monkeypatch.setattr(
        policy, "_drawn", lambda point, *given: seen.append(point.state) or drawn(point, *given)
    )
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 3, Rng.of(1))
    for state, point in zip(seen, policy.path(rollout), strict=True):
        assert torch.equal(state, point.state)
        assert not (point.mask & (state != policy.mask_id)).any()


def test_what_cannot_be_is_refused_and_what_is_cut_is_said_once():
    path = str(tiny_diffusers.folder("amused"))
    for options, sentence in (
        ({"size": 7}, "size 7 is not a multiple of 2"),
        ({"sampler": "maskgit", "choice": (0.0, 0.0)}, "choice must be above 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            Amused(path, **options)
    with pytest.raises(UserError, match="holds a AmusedPipeline, expected"):
        SD3(path)
    assert Amused(path, size=[4, 12]).grid == (2, 6)
    policy, unseen = amused(False), amused(False)
    prompts = [{"text": "red " * 100 + "seven"}, {"text": "a two"}]
    policy.admit(prompts)
    policy.encode(prompts)
    assert "1 of 2 prompts are longer than" in policy.report.notes[-1]
    assert not policy.report.warnings
    unseen.encode(prompts)
    unseen.encode([{"text": "blue " * 100}])
    (warning,) = unseen.report.warnings
    assert "tokens that CLIP reads" in warning


# --------------------------------------------------------------------------------------------------
# enumeration of four positions and two codes

NUMBER = 3 ** torch.arange(3, -1, -1)  # of a state; 2 is hidden


def small(**options):
    policy = amused(folder="amused-2", **{"steps": 2} | options)
    policy.logits = each_state_once(policy.logits)
    policy.places = partial(MaskedDiffusion.places, policy)  # by those
    return policy


def each_state_once(logits):
    """Equal rows go through the network once."""

    def found(ids, cond):
        rows = torch.cat([ids.double(), cond["pooled"].double()], 1)
        rows, index = rows.unique(dim=0, return_inverse=True)
        first = torch.full((len(rows),), len(ids)).scatter_reduce(
            0, index, torch.arange(len(ids)), "amin"
        )
        return logits(ids[first], {key: value[first] for key, value in cond.items()})[index]

    return found


def reward(sample):
    """An arbitrary number for every picture."""
    return Rng.of("reward").normal((sample * 2 ** torch.arange(4)).sum(1), dtype=torch.float64)


def states(policy):
    """[81, 4] every state and its guided logits [81, 4, 2], by the network called directly."""
    found = torch.tensor(list(itertools.product(range(3), repeat=4)))
    cond = policy.encode(PROMPTS[:1])
    z, empty = (
        policy.net(
            found.view(-1, 2, 2),
            encoder_hidden_states=c["text"].double().expand(81, -1, -1),
            pooled_text_emb=c["pooled"].double().expand(81, -1),
            micro_conds=torch.tensor([[4, 4, 0, 0, 6.0]]).double().expand(81, -1),
        )
        .flatten(2)
        .transpose(1, 2)
        for c in (cond, cond["uncond"])
    )
    if policy.logprob_guidance == "guided_stopgrad_uncond":
        empty = empty.detach()
    return found, empty + policy.guidance_scale * (z - empty)


def whole(policy, sample, mask, **fields):
    rows = len(sample)
    return make_rollout(
        group=torch.zeros(rows, dtype=torch.long),
        row_id=torch.arange(rows),
        cond=policy.encode(PROMPTS[:1]),
        prompts=PROMPTS[:1],
        sample=sample,
        mask=mask,
        logprob=torch.zeros(mask.shape).double(),
        **fields,
    )


def every_emerge(policy):
    """All trajectories [B], the log-probability of when their tokens are revealed, and E[reward] by
    the transition matrix of all states."""
    tokens = torch.tensor(list(itertools.product(range(2), repeat=4)))
    orders = torch.tensor(list(itertools.product(range(policy.passes), repeat=4)))
    order = orders.repeat(len(tokens), 1)
    k = policy.rates.double()
    prior = (k[:-1] - k[1:]).log()[order].sum(1)
    sample = tokens.repeat_interleave(len(orders), 0)
    rollout = whole(policy, sample, torch.ones_like(order).bool(), commit_step=order)
    found, logits = states(policy)
    p = (logits / policy.temperature).softmax(-1)
    now, then = found[:, None], found[None]  # [81, 1, 4], [1, 81, 4]
    token = torch.cat([p, torch.zeros_like(p[..., :1])], -1)[:, None].expand(-1, 81, -1, -1)
    token = token.gather(-1, then.expand(81, -1, -1)[..., None])[..., 0]
    mass = torch.zeros(81).double()
    mass[-1] = 1
    for t in range(policy.passes):
        stay = k[t + 1] / k[t]
        one = torch.where(then == 2, stay, (1 - stay) * token)
        one = torch.where(now == 2, one, (now == then).double())
        mass = mass @ one.prod(-1)
    return rollout, prior, (mass * reward(found) * (found < 2).all(1)).sum()


def kept(policy, odds):
    """What stays of a first draw, in order, and how likely: two that maskgit chooses, or by
    LLaDA2's rule those above the threshold, else the surest two."""
    if policy.sampler == "threshold":
        sure = [i for i, one in enumerate(odds.tolist()) if one > policy.threshold]
        yield sure if len(sure) >= 2 else odds.argsort(descending=True)[:2].tolist(), 1.0
        return
    weight = odds ** (1 / policy.noises[0])
    for a, b in itertools.permutations(range(4), 2):
        yield [a, b], weight[a] / weight.sum() * weight[b] / (weight.sum() - weight[a])


def every_choice(policy):
    """All trajectories of two passes [B], no more to be added to their log-probs, and E[reward],
    draw by draw."""
    _, logits = states(policy)
    p = (logits / policy.temperature).softmax(-1)
    sure = logits.softmax(-1) if policy.untempered_choice else p
    drawn, true, sizes = [], 0.0, set()
    for first in itertools.product(range(2), repeat=4):
        each, odds = (q[-1].gather(1, torch.tensor(first)[:, None])[:, 0] for q in (p, sure))
        for early, chosen in kept(policy, odds):
            sizes.add(len(early))
            state = torch.tensor([first[i] if i in early else 2 for i in range(4)])
            late = state == 2
            q = p[int((state * NUMBER).sum())][late]
            for second in itertools.product(range(2), repeat=4 - len(early)):
                sample = state.clone()
                sample[late] = torch.tensor(second, dtype=torch.long)
                odd = q.gather(1, sample[late][:, None]).prod()
                true = true + each.prod() * chosen * odd * reward(sample[None])[0]
                place = {i: k if policy.sampler == "maskgit" else 0 for k, i in enumerate(early)}
                ranks = [place.get(i, 4) for i in range(4)]
                last = torch.where(late, 4 if policy.sampler == "maskgit" else 0, 5).tolist()
                tokens = torch.where(late, sample, 0).tolist()
                drawn.append(([list(first), ranks], [tokens, last]))
    assert (len(sizes) > 1) == (policy.sampler == "threshold")
    drawn = torch.tensor(drawn).transpose(2, 3)  # [B, 2, 4, 2]
    early = drawn[:, 0, :, 1] < 4
    sample = torch.where(early, drawn[:, 0, :, 0], drawn[:, 1, :, 0])
    mask = torch.cat([torch.ones_like(early), ~early], 1)
    rollout = whole(policy, sample, mask, commit_step=(~early).long(), proposals=drawn)
    return rollout, torch.zeros(len(drawn)).double(), true


def log_prob(policy, rollout):
    """[B] of whole trajectories, by the points the objectives see."""
    return sum(
        (policy.dist(p).log_prob(p.target).masked_fill(~p.mask, 0)).sum(1)
        for p in policy.path(rollout)
    )


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("emerge", {}),
        ("emerge", {"guidance_scale": 2.5, "temperature": 0.7, "steps": 3}),
        ("emerge", {"guidance_scale": 5.0, "logprob_guidance": "guided_stopgrad_uncond"}),
        (
            "maskgit",
            {
                "guidance_scale": 2.5,
                "temperature": 0.5,
                "choice": (1.5, 0.0),
                "confidence": "untempered",
            },
        ),
        ("threshold", {"guidance_scale": 2.5, "threshold": 0.6}),
    ],
    ids=str,
)
def test_trajectories_and_the_gradient_of_the_expected_reward_are_exact(sampler, options):
    """With any baseline; samples come at the rate of their score."""
    policy = small(sampler=sampler, **options)
    rollout, prior, true = (every_emerge if sampler == "emerge" else every_choice)(policy)
    logp = log_prob(policy, rollout)
    p = (logp + prior).exp().detach()
    earned = reward(rollout.sample)
    assert abs(p.sum().item() - 1) < 1e-6  # rates are float32
    torch.testing.assert_close((p * earned).sum(), true.detach(), atol=1e-6, rtol=0)
    ours = flat_grad(policy, (p * (earned - 0.3) * logp).sum())
    torch.testing.assert_close(ours, flat_grad(policy, true), atol=1e-6, rtol=1e-5)
    code = 2 ** torch.arange(4)
    expected = torch.zeros(16).double().index_add(0, (rollout.sample * code).sum(1), p)
    with torch.no_grad():
        drawn = policy.rollout(PROMPTS[:1], 4000, Rng.of("many"))
        recorded = drawn.logprob.masked_fill(~drawn.mask, 0).sum(1)
        torch.testing.assert_close(log_prob(policy, drawn), recorded)
    count = torch.bincount((drawn.sample * code).sum(1), minlength=16)
    chi2 = ((count - 4000 * expected) ** 2 / (4000 * expected)).sum().item()
    assert chi2 < 37.7, chi2  # 15 degrees of freedom, 0.1 %
