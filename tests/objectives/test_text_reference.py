"""Text objectives against what TRL 1.16 and verl compute: loss and gradient through the trainer,
advantages, KLs.

The numbers are those of the published functions on one batch of four answers of up to four tokens.
"""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from mmrl import config
from mmrl.cli.listing import show_list
from mmrl.config.options import TrainOptions
from mmrl.config.presets import described, filled, presets
from mmrl.core.distributions import Categorical
from mmrl.core.errors import UserError
from mmrl.core.metrics import Meter
from mmrl.core.registry import ADVANTAGES, OBJECTIVES, SURROGATES, load_built_in
from mmrl.core.types import Rewards
from mmrl.objectives.kl import estimate
from mmrl.policies.base import Policy
from mmrl.policies.capabilities import Capabilities
from mmrl.policies.tokens import TokenPolicy
from mmrl.train.optimizers import sgd
from mmrl.zoo.objectives import ClipCov
from mmrl.zoo.objectives.covariance import Drawing
from samplers.noise import Rng
from tests.fixtures import toys
from tests.fixtures.records import make_point, make_rollout

load_built_in()

# rows of four tokens; -9 behind an answer's end
LOGP = [-0.9, -1.2, -0.3, -2.0, -1.5, -0.7, -0.4, -9, -0.2, -2.1, -1.0, -0.6, -1.1, -9, -9, -9]
OLD = [-1.2, -1.1, -0.3, -1.6, -1.1, -0.9, -0.9, -9, -0.6, -1.4, -1.3, -0.5, -1.0, -9, -9, -9]
REF = [-1.0, -1.0, -0.5, -1.8, -1.3, -0.8, -0.6, -9, -0.4, -1.8, -1.1, -0.7, -1.2, -9, -9, -9]
MASK = [1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0]
REWARDS = [1.0, 0.25, 0.0, 0.75]
PARTS = {"a": [1.0, 0.25, 0.0, 0.75], "b": [0.0, 1.0, 1.0, 1.0]}


def table(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype).view(4, 4)


class Table(nn.Module):
    """The log-prob of every token is a parameter."""

    def __init__(self, logp):
        super().__init__()
        self.logp = nn.Parameter(logp.clone())

    def forward(self, rows):
        chosen = self.logp[rows]
        # token 0, and all others together
        return torch.stack([chosen, torch.log(-torch.expm1(chosen))], -1)


class Exact(Categorical):
    """Token 0's log-prob is the parameter itself, to the last bit."""

    def log_prob(self, ids):
        return self.logits[..., 0]


class Recorded(Policy):
    """A policy whose rollout is always the batch above: token 0 was sampled everywhere."""

    capabilities = Capabilities("categorical")
    keep_groups_together = True

    def __init__(self, mask=MASK):
        super().__init__(Table(table(REF)))
        self.mask = table(mask, torch.bool)

    def rollout(self, prompts, copies, rng, context=None):
        rows = torch.arange(4)
        order = torch.arange(4).expand(4, 4)
        return make_rollout(
            group=torch.zeros(4, dtype=torch.long),
            row_id=rows,
            prompts=tuple(prompts),
            sample=torch.zeros(4, 4).long(),
            logprob=table(OLD),
            mask=self.mask,
            commit_step=order,
            cond=[{}],
        )

    path = TokenPolicy.path

    def dist(self, point):
        return Exact(self.net(point.row_id))

    def decode(self, rollout):
        return ["an answer"] * len(rollout)


def trainer(preset, changes=None, **train):
    """The trainer a configuration with this preset makes; ``changes`` replace options of its
    objective."""
    sections = filled({}, preset)
    ((name, options),) = sections["objective"].items()
    objective = config.build({name: {**options, **(changes or {})}}, OBJECTIVES)
    sizes = {"prompts_per_iteration": 1, "train_batch_size": 4, "max_grad_norm": None}
    built = toys.trainer(
        Recorded(),
        objective,
        lambda media, prompts: torch.tensor(REWARDS, dtype=torch.float64),
        config.build({"grpo": {"eps": 1e-4}}, ADVANTAGES),
        1.0,
        sgd,
        [{"text": "a question"}],
        **sizes | sections["train"] | train,
    )
    with torch.no_grad():  # away from the reference, whose snapshot was taken by now
        built.policy.net.logp.copy_(table(LOGP))
    return built


def loss_and_gradient(trainer):
    """Through collect and improve, as in an iteration whose weights have moved since they
    sampled."""
    before = trainer.policy.net.logp.detach().clone()
    batch = trainer.collect()
    meter = Meter()
    with meter.listening():
        assert trainer.update.improve(batch, batch.rollout, Rng.of("step"), False, meter)
    return meter.mean("loss"), (before - trainer.policy.net.logp.detach()).flatten()


ROWS = json.loads(Path(__file__).with_name("text_reference.json").read_text())


@pytest.mark.parametrize("row", ROWS)
def test_loss_and_gradient_are_those_of_the_published_code(row):
    """In passes of three rows and of one."""
    case = ROWS[row]
    built = trainer(case["preset"], case["objective"], micro_batch_size=3, **case["train"])
    loss, slope = loss_and_gradient(built)
    assert loss == pytest.approx(case["loss"], abs=1.1e-6)
    assert slope.tolist() == pytest.approx(case["gradient"], abs=1.1e-6)


PLUS_PLUS = {"reinforce_pp": {"baseline": True, "weigh": "rows"}}
ADVANTAGE_ROWS = [  # advantage, or a preset of verl's, and what TRL, ms-swift and verl return
    ({"grpo": {"eps": 1e-4}}, [1.095205, -0.547603, -1.095205, 0.547603]),
    ("dr_grpo", [0.5, -0.25, -0.5, 0.25]),
    ("rloo", [0.666667, -0.333333, -0.666667, 0.333333]),
    (PLUS_PLUS, [1.095205, -0.547603, -1.095205, 0.547603]),
    ("verl/grpo", [1.095443, -0.547721, -1.095443, 0.547721]),
    ("verl/dr_grpo", [0.5, -0.25, -0.5, 0.25]),
    ("verl/rloo", [0.666667, -0.333333, -0.666667, 0.333333]),
    ("verl/reinforce_pp_baseline", [1.203254, -0.46279, -1.018138, 0.647906]),
    ("verl/reinforce_pp", [1.203254, -0.46279, -1.018138, 0.647906]),
    ("verl/opo", [0.541667, -0.208333, -0.458333, 0.291667]),
    ("verl/gpg", [0.666667, -0.333333, -0.666667, 0.333333]),
    ("verl/pass_at_k", [0.547721, 0.0, 0.0, 0.0]),
]
TWO = {"ddof": 1, "eps_mode": "add"}
GDPO_ROWS = [  # of two rewards: ms-swift and TRL
    ({"gdpo": TWO | {"eps": 1e-8}}, [0.479183, -0.412985, -1.172756, 1.106558]),
    ({"gdpo": TWO | {"eps": 1e-4}}, [0.479099, -0.412923, -1.172592, 1.106416]),
]


def test_advantages_are_those_of_the_published_code(subtests):
    rollout = Recorded().rollout([{"text": "a question"}], 4, None)
    parts = {name: torch.tensor(x, dtype=torch.float64) for name, x in PARTS.items()}
    for spec, published in ADVANTAGE_ROWS + GDPO_ROWS:
        with subtests.test(spec=spec):
            rewards = Rewards(parts, {"b": 0.5 if "gdpo" in spec else 0.0})
            of_verl = isinstance(spec, str) and spec.startswith("verl/")
            chosen = presets()[spec]["advantage"] if of_verl else spec
            advantage = config.build(chosen, ADVANTAGES)(rewards, rollout)
            assert advantage[:, 0].tolist() == pytest.approx(published, abs=1.1e-6)


K2 = [0.005, 0.02, 0.02, 0.02, 0.02, 0.005, 0.02, 0, 0.02, 0.045, 0.005, 0.005, 0.005, 0, 0, 0]
K3 = [0.004837, 0.021403, 0.018731, 0.021403, 0.021403, 0.004837, 0.018731, 0]
K3 += [0.018731, 0.049859, 0.004837, 0.004837, 0.004837, 0, 0, 0]
K1 = [0.1, -0.2, 0.2, -0.2, -0.2, 0.1, 0.2, 0, 0.2, -0.3, 0.1, 0.1, 0.1, 0, 0, 0]
KLS = {"k1": K1, "abs": [abs(x) for x in K1], "k2": K2, "k3": K3, "k1+": K1, "k3+": K3}


@pytest.mark.parametrize("form", KLS)
@pytest.mark.parametrize("bounded", [False, True])
def test_kl_estimators_are_those_of_verl(form, bounded):
    kl = estimate(table(LOGP), table(REF), form, bounded)
    torch.testing.assert_close(kl, table(KLS[form]), atol=1.1e-6, rtol=0)


# Presets in a configuration

RUN = """
policy: {sd3: {path: "world:digits/sd3-test"}}
data: digits
reward: {digits: 1.0}
preset: verl/dapo
train: {prompts_per_iteration: 2, group_size: 4, train_batch_size: 8, iterations: 1}
"""


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds(name):
    sizes = {"prompts_per_iteration": 2, "group_size": 4, "train_batch_size": 8, "iterations": 1}
    sections = filled({"train": sizes}, name)
    config.build(sections["advantage"], ADVANTAGES)
    decisions = presets()[name]["decisions"]
    needs = config.build(sections["objective"], OBJECTIVES).requires.decisions
    assert needs in ("", "one pass" if decisions == "categorical" else decisions, decisions)
    assert TrainOptions(**sections["train"]).group_size == 4


def test_presets_are_listed_with_what_they_set_and_for_whom(capsys):
    show_list(["presets"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in presets()) and "flow and" in printed
    models, sections = described("paper/dance_grpo")
    assert models == "flow and diffusion models" and sections.splitlines() == [
        "advantage: dance_grpo",
        "objective: {policy_gradient: {clip_range: 0.0001, advantage_clip: 5, "
        "timestep_fraction: 0.6, timestep_selection: random}}",
        "train: {loss_agg_mode: token_mean}",
    ]
    assert described("paper/awm")[1].startswith("policy: {sde_type: ode, noise_level: 0}\n")


def test_a_preset_fills_what_is_not_written_and_is_written_out(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(RUN)
    loaded = config.load(file, ["objective.kl=0.04", "train.dynamic_sampling_rounds=0"])
    ppo = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    options = loaded["objective"]["policy_gradient"]
    assert options["surrogate"] == {"ppo": ppo} and options["kl"] == 0.04
    assert loaded["advantage"] == {"grpo": {"std": "group", "eps": 1e-6}}
    assert loaded["train"]["dynamic_sampling_rounds"] == 0
    assert loaded["train"]["loss_agg_mode"] == "token_mean"
    assert loaded.where("train.loss_agg_mode") == "preset verl/dapo"
    (tmp_path / "again.yaml").write_text(config.dump(loaded))
    assert config.load(tmp_path / "again.yaml").plain == loaded.plain
    overridden = config.load(file, ["preset=trl/gspo"])
    assert overridden["train"]["loss_agg_mode"] == "seq_mean_token_mean_all"
    assert "gspo" in overridden["objective"]["policy_gradient"]["surrogate"]
    file.write_text(RUN + "objective: {policy_gradient: {entropy: 0.01}}\nadvantage: rloo\n")
    written = config.load(file)
    assert written["advantage"] == "rloo"
    assert set(written["objective"]["policy_gradient"]) == {"entropy", "surrogate", "kl"}


def test_a_preset_says_how_a_flow_model_samples(tmp_path):
    loaded = config.load("configs/digits/flow_grpo.yaml", ["preset=paper/awm", "objective=awm"])
    assert loaded["policy"]["sd3"]["sde_type"] == "flow_sde"  # what is written stays
    path = '"world:digits/sd3-test"'
    text = RUN.replace("verl/dapo", "paper/mix_grpo_flash")
    (tmp_path / "run.yaml").write_text(text.replace(path, f"{path}, noise_level: 0.5"))
    loaded = config.load(tmp_path / "run.yaml")
    config.check(loaded)
    asked = {"path": "world:digits/sd3-test", "noise_level": 0.5}
    assert loaded["policy"]["sd3"] == presets()["paper/mix_grpo_flash"]["policy"] | asked
    assert loaded.where("policy.sd3.solver") == "preset paper/mix_grpo_flash"


WRITTEN = "preset: verl/dapo"
MISWRITTEN = [  # in place of the preset of the run above, what is said
    ("preset: verl/dap", "preset: unknown preset 'verl/dap'; did you mean 'verl/dapo'"),
    ("preset: [verl/dapo]", r"preset: unknown preset \['verl/dapo'\]"),
    (WRITTEN, "preset: verl/dapo is for models that write tokens.*paper/flow_grpo"),
    (
        "objective: {clip_cov: {surrogate: gspo}}",
        "objective.clip_cov: the objective ClipCov is for models that",
    ),
]
AS_IT_WAS = "trl/dapo .* would leave {} as it was: .*policy_gradient"
MISFITS = [  # shipped configuration, options, what is said
    ("digits/ar_grpo", "preset=paper/flow_grpo", "paper/flow_grpo is for flow and diffusion"),
    ("digits/ar_grpo", "preset=paper/d1 objective=masked", "paper/d1 is for masked diffusion"),
    ("digits/flow_grpo", "preset=paper/d1 objective=masked", "paper/d1 is for masked diffusion"),
    *[
        (name, f"preset=trl/dapo objective={objective}", AS_IT_WAS.format(objective))
        for name, objective in (
            ("digits/grpo_guard", "grpo_guard"),
            ("digits/dgpo", "dgpo"),
            ("vlm/counting", "kl_cov"),
            ("vlm/counting", "gvpo"),
        )
    ],
    (
        "vlm/counting",
        "objective=policy_gradient preset=verl/clip_cov",
        "would leave policy_gradient as it was: write objective: clip_cov; or remove",
    ),
]
FITS = [
    ("digits/ar_grpo", "preset=trl/dapo"),
    *[(f"digits/{name}", "preset=paper/rebel objective=rebel") for name in ("ar_grpo", "d1")],
    ("digits/flow_grpo", "preset=paper/rebel objective=rebel"),
    ("digits/dgpo", "objective=dgpo"),
    ("vlm/counting", "objective=gvpo"),
]


def test_presets_that_do_not_fit_are_refused(tmp_path, subtests):
    for written, says in MISWRITTEN:
        (tmp_path / "run.yaml").write_text(RUN.replace(WRITTEN, written))
        with subtests.test(written=written), pytest.raises(UserError, match=f"run.yaml:5: {says}"):
            config.check(config.load(tmp_path / "run.yaml"))
    for name, options, says in MISFITS:
        with subtests.test(name=name, options=options), pytest.raises(UserError, match=says):
            config.check(config.load(f"configs/{name}.yaml", options.split()))
    for name, options in FITS:
        with subtests.test(name=name, options=options):
            config.check(config.load(f"configs/{name}.yaml", options.split()))


@pytest.mark.parametrize(
    ("file", "objective"),
    [("digits/mask_grpo", "masked"), ("janus/t2i_r1", "unified"), ("vlm/counting", "clip_cov")],
)
def test_a_preset_reaches_every_objective_that_takes_surrogates(file, objective, tmp_path):
    plain = yaml.safe_load(Path(f"configs/{file}.yaml").read_text()) | {"preset": "trl/cispo"}
    written = plain["objective"].get(objective, {})
    written.pop("surrogate", None)
    plain["objective"] = {objective: written}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(plain))
    options = config.load(tmp_path / "run.yaml")["objective"][objective]
    kl = {"weight": 0.0, "form": "k3", "corrected": True}
    assert options == {"surrogate": {"cispo": {"cap": 5.0}}, "kl": kl} | written
    built = config.build({objective: options}, OBJECTIVES)
    assert built.surrogate.function.keywords == {"cap": 5.0}


# Clip-higher and Clip-Cov

CLIPPED = {  # surrogate -> its loss for one token of ratio rho and A = 1, by the upper bound it has
    "ppo": lambda rho, high: -min(rho, 1 + high),
    "gspo": lambda rho, high: -min(rho, 1 + high),
    "gspo_token": lambda rho, high: -min(rho, 1 + high),
    "luspo": lambda rho, high: -min(rho, 1 + high),
    "rloo": lambda rho, high: -min(rho, 1 + high),
    "gmpo": lambda rho, high: -min(rho, math.exp(high)),
    "cispo": lambda rho, high: -min(rho, 1 + high) * math.log(rho / 2),
}


ONE = torch.ones(1, 1)


@pytest.mark.parametrize("name", CLIPPED)
def test_clip_higher_has_an_upper_bound_of_its_own(name):
    """DAPO (Yu et al. 2025), eq. 10: A > 0 is clipped at 1 + high, A < 0 at 1 - low."""
    old = torch.tensor([[math.log(0.5)]], dtype=torch.float64)  # a token of probability 1/2
    mask = torch.ones(1, 1, dtype=torch.bool)
    for rho in (1.05, 1.15, 1.25, 1.5):
        for low, high in ((0.1, 0.2), (0.2, 0.1), (0.1, None)):
            if (name, high) == ("cispo", None):
                continue  # verl's form has no default
            bounds = {"clip_low": low, "clip_high": high}
            loss = SURROGATES[name](old + math.log(rho), old, ONE, mask, **bounds)
            expected = CLIPPED[name](rho, low if high is None else high)
            assert loss.item() == pytest.approx(expected), (rho, low, high)
    fallen = SURROGATES[name](old - 1, old, -ONE, mask, clip_low=0.1, clip_high=0.3)
    bound = {"gmpo": math.exp(-0.1), "cispo": 0.9 * (math.log(0.5) - 1)}.get(name, 0.9)
    assert fallen.item() == pytest.approx(bound)
    # TRL's delta bounds the ratio that is not clipped; A > 0 still ends at 1 + high
    for low, high in ((0.2, 0.28), (0.3, None)):
        bounds = {"clip_low": low, "clip_high": high, "delta": 4.0}
        loss = SURROGATES["ppo"](old + 1, old, ONE, mask, **bounds)
        assert loss.item() == pytest.approx(-(1 + (low if high is None else high)))


def cov_point(ratios, fresh):
    """One row of tokens of probability 1/2, and log-probs by ``ratios``; the first drew the
    smallest numbers."""
    old = torch.full((1, len(ratios)), math.log(0.5), dtype=torch.float64)
    draws = torch.linspace(0.1, 0.9, len(ratios), dtype=torch.float64)[None]
    point = make_point(
        group=torch.zeros(1, dtype=torch.long),
        row_id=torch.zeros(1, dtype=torch.long),
        state=old,
        logprob=old,
        mask=torch.ones(1, len(ratios), dtype=torch.bool),
        advantage=torch.ones(1, 1).double(),
        coupling=Drawing(draw=draws),
        on_policy=fresh,
    )
    return point, old + torch.tensor([ratios], dtype=torch.float64).log()


def test_clip_cov_spends_its_share_on_tokens_that_are_not_clipped():
    """As verl's compute_policy_loss_clip_cov, which takes clipped tokens out of the window
    first."""
    objective = ClipCov(share=0.5, low=-100.0, high=100.0)
    # with A > 0 the first three are clipped at 1.2, the last is not
    ratios = [1.5, 1.3, 1.21, 1.1, 1.0, 0.7]
    point, logp = cov_point(ratios, fresh=False)
    assert objective.couple(point, logp).coupling.held.tolist() == [[0, 0, 0, 1, 1, 1]]
    point, logp = cov_point(ratios, fresh=True)  # on the first step no ratio is clipped
    assert objective.couple(point, logp).coupling.held.tolist() == [[1, 1, 1, 0, 0, 0]]
    point, logp = cov_point([1.5] * 6, fresh=False)
    assert not objective.couple(point, logp).coupling.held.any(), "all are clipped already"
