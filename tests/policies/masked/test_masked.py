"""Masked diffusion: aMUSEd equals its pipeline, and likelihoods of trajectories are exact by
enumeration."""

import itertools
import math
from functools import partial

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.policies.masked.policy import Hidden, MaskedDiffusion, alike
from mmrl.zoo.models.masked.amused import Amused
from mmrl.zoo.models.masked.uvit import asking, share_texts
from mmrl.zoo.objectives import Masked
from samplers import unmask
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers, toys
from tests.fixtures.image_tokens import trainer_of
from tests.fixtures.records import make_rollout

TEXTS = ["a red seven", "a blue two"]
PROMPTS = [{"text": text} for text in TEXTS]


def small(double=True, **options):
    """Four positions, two codes."""
    policy = Amused(
        str(tiny_diffusers.folder("amused-2")), steps=options.pop("steps", 2), **options
    )
    policy.logits = each_state_once(policy.logits)
    policy.places = partial(MaskedDiffusion.places, policy)  # by those
    return spread(policy, double)


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


def spread(policy, double=True):
    with torch.no_grad():
        for p in policy.net.parameters():
            p.mul_(1.5)  # far from uniform
    if double:
        policy.net.double()
    return policy


# -------------------------------------------------------------------------------------------------
# schedules, choice


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


def test_gumbel_ranks_follow_plackett_luce():
    rows = 20000
    weight = torch.tensor([0.5, -1.0, 0.3, 1.2, 9.0])
    hidden = torch.tensor([[True] * 4 + [False]]).expand(rows, -1)
    uniform = Rng.of("ranks").uniform(torch.arange(rows), (5,))
    rank = unmask.ranked(weight.expand(rows, -1), uniform, 1.5, hidden, 2)
    assert (rank[:, 4] == 6).all() and ((rank < 5).sum(1) == 2).all()
    total = 0.0
    for first, second in itertools.permutations(range(4), 2):
        one = torch.full((1, 5), 5)
        one[0, first], one[0, second], one[0, 4] = 0, 1, 6
        p = unmask.plackett_luce(weight[None] / 1.5, one).sum().exp().item()
        share = ((rank[:, first] == 0) & (rank[:, second] == 1)).double().mean().item()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / rows), (first, second)
        total += p
    assert abs(total - 1) < 1e-6


# --------------------------------------------------------------------------------------------------
# the pipeline


@pytest.mark.parametrize(("guidance", "choice"), [(1.0, (2.0, 0.0)), (3.0, (0.5, 0.1))])
def test_maskgit_is_the_pipeline(guidance, choice, monkeypatch):
    """Tokens equal and pixels too, where both get the same uniform numbers."""
    from diffusers import AmusedPipeline
    from diffusers.schedulers import scheduling_amused

    policy = spread(
        Amused(
            path := str(tiny_diffusers.folder("amused")),
            steps=5,
            sampler="maskgit",
            guidance_scale=guidance,
            choice=choice,
        ),
        double=False,
    )
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


def test_sizes_and_temperatures_that_cannot_be(tmp_path):
    path = str(tiny_diffusers.folder("amused"))
    with pytest.raises(UserError, match="size 7 is not a multiple of 2"):
        Amused(path, size=7)
    with pytest.raises(UserError, match="choice must be above 0"):
        Amused(path, sampler="maskgit", choice=(0.0, 0.0))
    with pytest.raises(UserError, match="holds a AmusedPipeline, expected"):
        from mmrl.zoo.models.diffusion.sd3 import SD3

        SD3(path)
    assert Amused(path, size=[4, 12]).grid == (2, 6)


def test_gradient_checkpointing_changes_nothing():
    policy = spread(Amused(str(tiny_diffusers.folder("amused")), steps=3))
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 2, Rng.of(0))
    point = list(policy.path(rollout))[1]
    grads = []
    for _ in range(2):
        policy.net.zero_grad()
        policy.dist(point).log_prob(point.target).sum().backward()
        grads.append(
            torch.cat([p.grad.flatten() for p in policy.net.parameters() if p.grad is not None])
        )
        policy.enable_gradient_checkpointing()
    torch.testing.assert_close(grads[0], grads[1], atol=1e-12, rtol=0)


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


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"guidance_scale": 3.0},
        {"guidance_scale": 3.0, "logprob_guidance": "guided_stopgrad_uncond"},
    ],
)
def test_asking_for_some_places_is_a_part_of_all(options):
    """Shared texts, logits of some tokens and the mixture before the codebook give the same,
    gradient too."""
    policy = spread(Amused(str(tiny_diffusers.folder("amused")), steps=3, **options))
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 3, Rng.of(0))
    point = list(policy.path(rollout))[1]
    assert 0 < point.mask.sum() < point.mask.numel()
    found = []
    for places in (policy.places, partial(MaskedDiffusion.places, policy)):
        policy.places = places
        policy.net.zero_grad()
        logp = policy.dist(point).log_prob(point.target)
        logp.sum().backward()
        grad = torch.cat([p.grad.flatten() for p in policy.net.parameters() if p.grad is not None])
        found.append((logp.detach(), grad))
    # norms are in float32 throughout
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("order", "dtype"), [([0, 0, 1, 1], torch.float64), ([2, 0, 3, 1], torch.float32)]
)
@torch.no_grad()
def test_the_quickened_network_is_that_of_diffusers(dtype, order):
    """All weights random, those too that begin at 0: all logits, and guided ones of some places by
    shared texts, whose rows lie side by side or not."""
    from diffusers import UVit2DModel

    path = str(tiny_diffusers.folder("amused"))
    policy = Amused(path).net.to(dtype)
    plain = UVit2DModel.from_pretrained(path, subfolder="transformer").to(dtype)
    for i, (ours, theirs) in enumerate(zip(policy.parameters(), plain.parameters(), strict=True)):
        noise = (
            Rng.of("quick", i).normal(torch.zeros(1), (ours.numel(),), dtype=dtype).view_as(ours)
        )
        theirs.add_(0.3 * noise)
        ours.copy_(theirs)
    side = plain.config.sample_size
    rows = torch.tensor(order)
    where = Rng.of("where").uniform(torch.arange(2), (16,)) < 0.4
    where[:, 3] = True
    ids = (
        (Rng.of("ids").uniform(torch.arange(2), (side, side)) * plain.config.vocab_size)
        .long()
        .repeat(2, 1, 1)
    )
    text = Rng.of("text").normal(
        torch.arange(max(order) + 1), (5, plain.config.encoder_hidden_size), dtype=dtype
    )
    pooled = Rng.of("pool").normal(
        torch.arange(max(order) + 1), (plain.config.cond_embed_dim,), dtype=dtype
    )[rows]
    micro = torch.tensor([[16, 16, 0, 0, 6.0]], dtype=dtype).expand(4, -1)
    wanted = plain(ids, text[rows], pooled, micro)
    torch.testing.assert_close(policy(ids, text[rows], pooled, micro), wanted, atol=1e-5, rtol=1e-6)
    flat = wanted.flatten(2).transpose(1, 2)
    mixed = (flat[2:] + 3 * (flat[:2] - flat[2:]))[where]
    with asking(policy, where, 3.0):
        found = policy(ids, text, pooled, micro, cross_attention_kwargs={"rows": rows})
    torch.testing.assert_close(found, mixed, atol=1e-5, rtol=1e-5)


def test_the_first_pass_looks_at_one_image_a_prompt(monkeypatch):
    policy = Amused(str(tiny_diffusers.folder("amused")), steps=3, guidance_scale=2.0)
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


def test_half_precision():
    """bfloat16 weights: log-probs are recorded in float32 and found again to 0.02 on average; the
    gate lets that pass, and not half a nat."""
    policy = Amused(
        str(tiny_diffusers.folder("amused")), steps=3, guidance_scale=2.0, dtype="bfloat16", lora=2
    )
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS, 4, Rng.of("half"))
    gaps = [
        (policy.dist(p).log_prob(p.target) - p.logprob)[p.mask].abs() for p in policy.path(rollout)
    ]
    assert rollout.logprob.dtype == torch.float32 and torch.cat(gaps).mean() < 2e-2
    first = trainer_of(policy, PROMPTS, precision="bf16", objective=Masked()).iterate()
    assert first["clip_fraction"] == 0 and first["skipped_steps"] == 0
    with pytest.raises(UserError, match="re-scored log-probs differ .* on average"):
        trainer_of(
            toys.misremembers(policy, 0.5), PROMPTS, precision="bf16", objective=Masked()
        ).iterate()


# --------------------------------------------------------------------------------------------------
# enumeration


def every_emerge(policy):
    """All trajectories of the first prompt [B] with the log-probability of when tokens were
    revealed."""
    tokens = torch.tensor(list(itertools.product(range(2), repeat=4)))
    orders = torch.tensor(list(itertools.product(range(policy.passes), repeat=4)))
    sample = tokens.repeat_interleave(len(orders), 0)
    order = orders.repeat(len(tokens), 1)
    k = policy.rates.double()
    prior = (k[:-1] - k[1:]).log()[order].sum(1)  # of when each token is revealed
    return whole(
        policy, sample, commit_step=order, mask=torch.ones_like(order, dtype=torch.bool)
    ), prior


def every_maskgit(policy):
    """All tokens drawn and all choices of two of four positions in order, then the rest."""
    rows = []
    for first in itertools.product(range(2), repeat=4):
        for a, b in itertools.permutations(range(4), 2):
            for second in itertools.product(range(2), repeat=2):
                rank = [4] * 4
                late = iter(second)
                rank[a], rank[b] = 0, 1
                last = [next(late) if i not in (a, b) else 0 for i in range(4)]
                rows.append(
                    ([list(first), rank], [last, [5 if i in (a, b) else 4 for i in range(4)]])
                )
    drawn = torch.tensor(rows).transpose(2, 3)  # [B, 2, 4, 2]
    early = drawn[:, 0, :, 1] < 4
    sample = torch.where(early, drawn[:, 0, :, 0], drawn[:, 1, :, 0])
    mask = torch.cat([torch.ones_like(early), ~early], 1)
    return whole(
        policy, sample, commit_step=(~early).long(), mask=mask, proposals=drawn
    ), torch.zeros(len(rows)).double()


def kept_by(policy, odds):
    """The first pass's tokens by LLaDA2's rule, in a loop: those above the threshold, else two."""
    sure = {i for i, one in enumerate(odds.tolist()) if one > policy.threshold}
    return sure if len(sure) >= 2 else set(odds.argsort(descending=True)[:2].tolist())


def every_threshold(policy):
    """All tokens drawn, of which the weights keep some, and then the rest."""
    rows = []
    with torch.no_grad():
        _, p = states(policy)
    for first in itertools.product(range(2), repeat=4):
        early = kept_by(policy, p[-1].gather(1, torch.tensor(first)[:, None])[:, 0])
        for second in itertools.product(range(2), repeat=4 - len(early)):
            late = iter(second)
            last = [0 if i in early else next(late) for i in range(4)]
            rows.append((list(first), last, [i in early for i in range(4)]))
    first, last, early = (torch.tensor(part) for part in zip(*rows, strict=True))
    rank = torch.stack([torch.where(early, 0, 4), torch.where(early, 5, 0)], 1)
    drawn = torch.stack([torch.stack([first, last], 1), rank], -1)
    sample = torch.where(early, first, last)
    mask = torch.cat([torch.ones_like(early), ~early], 1)
    rollout = whole(policy, sample, commit_step=(~early).long(), mask=mask, proposals=drawn)
    return rollout, torch.zeros(len(rows)).double()


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


def log_prob(policy, rollout):
    """[B] of whole trajectories, by the points the objectives see."""
    return sum(
        (policy.dist(p).log_prob(p.target).masked_fill(~p.mask, 0)).sum(1)
        for p in policy.path(rollout)
    )


EVERY = {"emerge": every_emerge, "maskgit": every_maskgit, "threshold": every_threshold}
CASES = [
    ("emerge", {}),
    ("emerge", {"guidance_scale": 2.5, "temperature": 0.7, "steps": 3}),
    ("maskgit", {"guidance_scale": 2.5, "choice": (0.4, 0.0)}),
    ("maskgit", {"temperature": 0.5, "choice": (1.5, 0.0), "confidence": "untempered"}),
    ("threshold", {"guidance_scale": 2.5, "threshold": 0.6}),
]


def reward(sample):
    """An arbitrary number for every picture."""
    return Rng.of("reward").normal((sample * 2 ** torch.arange(4)).sum(1), dtype=torch.float64)


@pytest.mark.parametrize(("sampler", "options"), CASES)
def test_probabilities_sum_to_1_and_ratios_are_unbiased(sampler, options):
    policy = small(sampler=sampler, **options)
    rollout, prior = EVERY[sampler](policy)
    with torch.no_grad():
        old = log_prob(policy, rollout)
        p_old = (old + prior).exp()
        assert abs(p_old.sum().item() - 1) < 1e-6
        for p in policy.net.parameters():
            p.add_(0.1 * Rng.of("step").normal(torch.arange(p.numel()), dtype=p.dtype).view_as(p))
        new = log_prob(policy, rollout)
    ratio = (new - old).exp()
    r = reward(rollout.sample)
    assert (ratio - 1).abs().max() > 0.05
    assert abs((p_old * ratio).sum().item() - 1) < 1e-6  # rates are float32
    torch.testing.assert_close(
        (p_old * ratio * r).sum(), ((new + prior).exp() * r).sum(), atol=1e-10, rtol=0
    )


@pytest.mark.parametrize(("sampler", "options"), CASES)
def test_samples_are_distributed_as_scored(sampler, options):
    policy = small(sampler=sampler, **options)
    rollout, prior = EVERY[sampler](policy)
    code = 2 ** torch.arange(4)
    with torch.no_grad():
        p = (
            torch.zeros(16)
            .double()
            .index_add(0, (rollout.sample * code).sum(1), (log_prob(policy, rollout) + prior).exp())
        )
        drawn = policy.rollout(PROMPTS[:1], 4000, Rng.of("many"))
        torch.testing.assert_close(
            log_prob(policy, drawn), drawn.logprob.masked_fill(~drawn.mask, 0).sum(1)
        )
    count = torch.bincount((drawn.sample * code).sum(1), minlength=16)
    chi2 = ((count - 4000 * p) ** 2 / (4000 * p)).sum().item()
    assert chi2 < 37.7, chi2  # 15 degrees of freedom, 0.1 %


def states(policy):
    """[81, 4] every state and, by the network called directly, its token probabilities [81, 4,
    2]."""
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
    z = empty + policy.guidance_scale * (z - empty)
    return found, (z / policy.temperature).softmax(-1)


def true_return(policy):
    """E[reward] by the transition matrix of all states, independently of the policy's sampling and
    scoring."""
    found, p = states(policy)
    # [81, 1, 4], [1, 81, 4]
    now = found[:, None]
    then = found[None]
    token = torch.cat([p, torch.zeros_like(p[..., :1])], -1)[:, None].expand(-1, 81, -1, -1)
    token = token.gather(-1, then.expand(81, -1, -1)[..., None])[..., 0]
    mass = torch.zeros(81).double()
    mass[-1] = 1
    for t in range(policy.passes):
        stay = policy.rates[t + 1].double() / policy.rates[t].double()
        one = torch.where(then == 2, stay, (1 - stay) * token)
        one = torch.where(now == 2, one, (now == then).double())
        mass = mass @ one.prod(-1)
    return (mass * reward(found) * (found < 2).all(1)).sum()


def gradient(policy, loss):
    policy.net.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.net.parameters() if p.grad is not None])


@pytest.mark.parametrize("options", [{}, {"guidance_scale": 2.5, "temperature": 0.7, "steps": 3}])
def test_the_gradient_is_that_of_the_expected_reward(options):
    policy = small(**options)
    rollout, prior = every_emerge(policy)
    logp = log_prob(policy, rollout)
    weight = (logp + prior).exp().detach() * (reward(rollout.sample) - 0.3)  # any baseline
    ours = gradient(policy, (weight * logp).sum())
    true = gradient(policy, true_return(policy))
    torch.testing.assert_close(ours, true, atol=1e-6, rtol=1e-5)


def true_choice(policy):
    """E[reward] of two passes of maskgit, by the network called directly and the choice's two draws
    one by one."""
    found, p = states(policy)
    number = 3 ** torch.arange(3, -1, -1)
    total = 0
    for first in itertools.product(range(2), repeat=4):
        each = p[-1].gather(1, torch.tensor(first)[:, None])[:, 0]  # of all hidden
        weight = each ** (1 / policy.noises[0])
        for a, b in itertools.permutations(range(4), 2):
            chosen = weight[a] / weight.sum() * weight[b] / (weight.sum() - weight[a])
            state = torch.full((4,), 2)
            state[a], state[b] = first[a], first[b]
            q = p[int((state * number).sum())]
            for second in itertools.product(range(2), repeat=2):
                sample = state.clone()
                late = state == 2
                sample[late] = torch.tensor(second)
                odds = q[late].gather(1, sample[late][:, None]).prod()
                total = total + each.prod() * chosen * odds * reward(sample[None])[0]
    return total


@pytest.mark.parametrize(
    "options", [{"choice": (1.5, 0.0)}, {"guidance_scale": 2.5, "choice": (1.0, 0.0)}], ids=str
)
def test_the_gradient_of_a_choice_is_that_of_the_expected_reward(options):
    policy = small(sampler="maskgit", **options)
    rollout, _ = every_maskgit(policy)
    logp = log_prob(policy, rollout)
    weight = logp.exp().detach() * (reward(rollout.sample) - 0.3)
    true = gradient(policy, true_choice(policy))
    torch.testing.assert_close(gradient(policy, (weight * logp).sum()), true, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{"threshold": 0.5}, {"guidance_scale": 2.5}], ids=str)
def test_the_gradient_of_a_threshold_is_that_of_the_expected_reward(options):
    """By the network called directly: what is kept changes at single weights only."""
    policy = small(sampler="threshold", **({"threshold": 0.6} | options))
    rollout, _ = every_threshold(policy)
    logp = log_prob(policy, rollout)
    weight = logp.exp().detach() * (reward(rollout.sample) - 0.3)
    _, p = states(policy)
    true = 0
    sizes = set()
    for first in itertools.product(range(2), repeat=4):
        each = p[-1].gather(1, torch.tensor(first)[:, None])[:, 0]
        early = kept_by(policy, each.detach())
        sizes.add(len(early))
        state = torch.tensor([first[i] if i in early else 2 for i in range(4)])
        q = p[int((state * 3 ** torch.arange(3, -1, -1)).sum())]
        late = state == 2
        for second in itertools.product(range(2), repeat=4 - len(early)):
            sample = state.clone()
            sample[late] = torch.tensor(second, dtype=torch.long)
            odds = q[late].gather(1, sample[late][:, None]).prod()
            true = true + each.prod() * odds * reward(sample[None])[0]
    assert len(sizes) > 1
    ours = gradient(policy, (weight * logp).sum())
    torch.testing.assert_close(ours, gradient(policy, true), atol=1e-6, rtol=1e-5)


def test_conditional_scores_give_another_gradient():
    with pytest.warns(UserWarning, match="guided matches"):
        policy = small(guidance_scale=5.0, logprob_guidance="conditional")
    rollout, prior = every_emerge(policy)
    logp = log_prob(policy, rollout)
    matched = small(guidance_scale=5.0)
    with torch.no_grad():
        weight = (log_prob(matched, rollout) + prior).exp()
    true = gradient(matched, true_return(matched))
    ours = gradient(policy, (weight * reward(rollout.sample) * logp).sum())
    assert torch.nn.functional.cosine_similarity(ours, true, dim=0) < 0.99
    stopped = small(guidance_scale=5.0, logprob_guidance="guided_stopgrad_uncond")
    torch.testing.assert_close(log_prob(stopped, rollout), log_prob(matched, rollout))


def test_without_gradient_through_the_unconditional_logits():
    """That of the guided score with z_u held fixed, by the network called directly."""
    policy = small(guidance_scale=5.0, logprob_guidance="guided_stopgrad_uncond")
    rollout, _ = every_emerge(policy)
    weight = reward(rollout.sample)
    found = gradient(policy, (weight * log_prob(policy, rollout)).sum())
    expected = 0.0
    for point in policy.path(rollout):
        ids, index = point.state.unique(dim=0, return_inverse=True)
        cond = policy.encode(PROMPTS[:1])
        z, empty = (
            policy.net(
                ids.view(-1, 2, 2),
                encoder_hidden_states=c["text"].double().expand(len(ids), -1, -1),
                pooled_text_emb=c["pooled"].double().expand(len(ids), -1),
                micro_conds=torch.tensor([[4, 4, 0, 0, 6.0]]).double().expand(len(ids), -1),
            )
            .flatten(2)
            .transpose(1, 2)
            for c in (cond, cond["uncond"])
        )
        guided = (empty.detach() + 5 * (z - empty.detach())).log_softmax(-1)[index]
        each = guided.gather(-1, rollout.sample[..., None])[..., 0].masked_fill(~point.mask, 0)
        expected = expected + (weight * each.sum(1)).sum()
    # norms are in float32
    torch.testing.assert_close(found, gradient(policy, expected), atol=1e-4, rtol=1e-6)


@pytest.mark.parametrize("sampler", EVERY)
def test_states_of_the_path_are_those_that_were_visited(sampler, monkeypatch):
    policy = Amused(str(tiny_diffusers.folder("amused")), steps=4, sampler=sampler)
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


def test_a_choice_ignores_visible_positions():
    logits = (
        torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    )
    decision = torch.tensor([[0, 1, 2, 0, 1], [0, 5, 1, 6, 6]]).T.expand(2, 5, 2)
    where = decision[..., 1] < 6
    Hidden(logits[where], where, torch.ones(2, 1).double()).log_prob(decision)[
        :, :3
    ].sum().backward()
    assert (logits.grad[:, :3] != 0).any() and (logits.grad[:, 3:] == 0).all()


def test_texts_that_clip_cuts_are_said_once():
    policy = Amused(str(tiny_diffusers.folder("amused")), steps=2)
    prompts = [{"text": "red " * 100 + "seven"}, {"text": "a two"}]
    policy.admit(prompts)
    assert "1 of 2 prompts are longer than" in policy.report.notes[-1]
    policy.encode(prompts)
    assert not policy.report.warnings
    unseen = Amused(str(tiny_diffusers.folder("amused")), steps=2)
    unseen.encode(prompts), unseen.encode([{"text": "blue " * 100}])
    assert (
        len(unseen.report.warnings) == 1 and "tokens that CLIP reads" in unseen.report.warnings[0]
    )
