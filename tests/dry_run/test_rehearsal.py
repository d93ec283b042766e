"""``--devices``: fake weights take what real ones take, in the same trackers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from mmrl.apps.dry_run import architectures, rehearsal
from mmrl.apps.dry_run.estimate import estimate, fit, measure
from mmrl.apps.dry_run.page import lines
from mmrl.apps.dry_run.tracked import tracked
from mmrl.cli.app import app
from mmrl.config.options import TrainOptions
from mmrl.core.cards import CARDS, Devices, devices
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in, locate
from samplers.batching import peak_bytes
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion.test_any_pipeline import FAMILIES, place_of
from tests.policies.diffusion.test_any_pipeline import make as replayed
from tests.policies.diffusion.test_folder_families import CASES, PROMPTS, make

load_built_in()
ROOT = Path(__file__).parents[2] / "configs"
PLAIN = TrainOptions(2, 2, 4, 1)


def passing(policy):
    """A function that scores what the policy has sampled."""
    with torch.no_grad():
        rollout = policy.rollout(PROMPTS[:1], 2, Rng.of("same"))
    point = next(iter(policy.path(rollout)))
    return lambda: policy.dist(point).log_prob(point.target)


def real(policy):
    """Track a pass of the real tiny model, made and scored as training does."""
    score = passing(policy)
    return tracked(lambda: score().sum().backward(), [policy.net])


def rehearsed(case, **options):
    name, of_case = CASES[case].policy, CASES[case].own
    place = tiny_diffusers.folder(case)
    chosen = of_case | {"path": str(place), "steps": 3, "fixed_batch_rows": 2} | options
    stage = rehearsal.flow(POLICIES[name], place, chosen, PLAIN, 2)
    return rehearsal.rehearse(stage, decode=False)


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("sdxl", {"guidance_scale": 2.0}),
        ("flux", {"guidance_scale": 2.0}),
        ("flux", {"lora": 2, "quantization": "nf4"}),
        ("wan-two", {"guidance_scale": 2.0}),
    ],
)
def test_memory_on_fakes_is_within_a_tenth_of_a_real_pass(case, options):
    policy = make(case, fixed_batch_rows=2, **options)
    measured = real(policy)
    guess = rehearsed(case, **options)
    assert guess.bytes_parameters == sum(p.nbytes for p in policy.net.parameters())
    assert guess.update.memory["total"] == pytest.approx(measured.memory["total"], rel=0.1)
    for part in ("parameters", "activations"):
        assert guess.update.memory[part] == pytest.approx(measured.memory[part], rel=0.1), part
    assert guess.update.flops == pytest.approx(measured.flops, rel=0.1)
    assert guess.trained == sum(p.numel() for p in policy.net.parameters() if p.requires_grad)


def test_a_replayed_pipeline_is_looked_at_by_its_family():
    """Against a real pass of the replay, whose networks make the same ones."""
    name, options = "sd3", {"guidance_scale": 2.0}
    _, call = FAMILIES[name]
    policy = replayed(name, call, fixed_batch_rows=2, **options)
    measured = real(policy)
    written = {"path": place_of(name), "call": call} | options
    changes = [f"policy.pipeline.{key}={json.dumps(value)}" for key, value in written.items()]
    run = measure(ROOT / "digits" / "pipeline.yaml", [*changes, *SMALL], 1)
    assert run.report.stand_in == name and run.report.network_rows == 2
    assert run.measured.update.flops == measured.flops
    activations = run.measured.update.memory["activations"]
    assert activations == pytest.approx(measured.memory["activations"], rel=0.01)
    assert f"estimated as if it were the built-in family {name}" in next(iter(lines(run.report)))


@pytest.mark.parametrize(("case", "kind"), [("sd3", "bfloat16"), ("wan", "float32")])
def test_buffers_have_the_type_they_are_loaded_in(case, kind):
    """Those that a file of weights holds are converted, as Stable Diffusion 3's table of places,
    which was half of a small model's bytes; others stay."""
    place = locate("world:digits/sd3-test") if case == "sd3" else tiny_diffusers.folder(case)
    own = CASES["wan"].own if case == "wan" else {}
    chosen = {"path": str(place), "size": 32, "dtype": "bfloat16"} | own
    loaded = POLICIES.build(case, **chosen)
    stage = rehearsal.flow(POLICIES[case], Path(place), chosen, PLAIN, 2)
    types = [{n: x.dtype for n, x in net.named_buffers()} for net in (loaded.net, stage.net)]
    assert types[0] == types[1] and set(types[0].values()) == {getattr(torch, kind)}


def test_conditions_are_those_that_a_rollout_holds():
    policy = make("flux")
    held = policy.encode(PROMPTS[:2])
    uncond = held.pop("uncond", {})
    each, empty = rehearsed("flux").conditions
    found = [sum(x.nbytes for x in tree_leaves(part)) for part in (held, uncond)]
    assert found == [2 * each, empty]


def test_the_tracker_counts_what_torch_allocates():
    """The peak beside the weights, against the CPU allocator as torch's profiler sees it."""
    policy = make("flux", fixed_batch_rows=2)
    score, sums = passing(policy), []

    def forward():
        sums.append(score())

    kept = tracked(forward, [policy.net]).memory
    sums.clear()
    assert kept["activations"] == pytest.approx(peak_bytes(forward), rel=0.1)


def test_a_mixture_of_experts_is_passed_through_by_few_of_them():
    """LLaDA2.0-mini: 16 billion numbers, of which a token meets a few; adapters on attention."""
    options = {"lora": 64, "dtype": "bfloat16", "max_new_tokens": 4}
    entry, place = POLICIES["masked_lm"], "inclusionAI/LLaDA2.0-mini"
    stage = rehearsal.tokens(place, entry, options, PLAIN, 2, 2)
    numbers = [p.numel() for p in stage.net.parameters()]
    trained = sum(p.numel() for p in stage.net.parameters() if p.requires_grad)
    assert trained == 64 * 20 * (2048 + 3072 + 2048 + 2048)
    assert sum(numbers) - trained == 16_255_638_528
    attention = 20 * 2048 * (3072 + 2048)
    experts = 19 * (256 * 2048 + 9 * 3 * 2048 * 512)  # the router, eight and one that all share
    met = attention + experts + 3 * 2048 * 5120 + 157184 * 2048  # a dense layer, and the head
    with torch.no_grad():
        flops = tracked(stage.score, [stage.net]).flops
    tokens = 2 * (4 + rehearsal.TEXT_TOKENS)
    assert flops / (2 * tokens * (met + trained)) == pytest.approx(1.0, abs=0.01)


def test_cards_are_read_and_others_named():
    assert devices("8xH100") == Devices(8, CARDS["H100"]) == devices("8 x NVIDIA-h100")
    assert devices("A100").card.name == "A100-80" and devices("rtx 4090").count == 1
    assert devices("16xB200").machines == 2
    for wrong in ("8xH99", "", "0xH100"):
        with pytest.raises(UserError, match="--devices .*cards are A100-80, H100"):
            devices(wrong)


SMALL = [
    "train.prompts_per_iteration=8",
    "train.group_size=8",
    "train.train_batch_size=64",
    "train.micro_batch_size=2",
]


def test_shards_share_out_weights_and_their_traffic_is_counted_by_hand():
    run = measure(ROOT / "digits" / "flow_grpo.yaml", SMALL, 2)
    cards = devices("2xH100")
    copies = estimate(run, cards, sharded=False)
    shards = estimate(run, cards, sharded=True)
    assert shards.memory["parameters"] == copies.memory["parameters"] / 2
    assert copies.gathered == 0 and shards.gathered > 0
    steps = run.report.plan.steps * run.report.train.epochs
    assert copies.reduced == 2 * 0.5 * run.measured.bytes_trained * steps
    assert 0 < copies.mfu < 1 and copies.fits and copies.flops > 0
    assert estimate(run, devices("2xB200"), sharded=False).whole < copies.whole


def test_what_fits_is_proposed_as_overrides_to_paste():
    file = ROOT / "digits" / "flow_grpo.yaml"
    words = [*SMALL[:3], f"policy.path={locate('world:digits/sd3-test')}"]
    proposals = list(fit(file, words, devices("H100")))
    assert proposals[0].overrides[0] == "train.micro_batch_size=64"
    assert all(proposal.estimate.fits for proposal in proposals)


def test_the_command_prints_cards_and_refuses_what_it_cannot_say():
    arguments = ["train", str(ROOT / "digits" / "flow_grpo.yaml"), *SMALL, "--dry-run"]
    printed = CliRunner().invoke(app, [*arguments, "--devices", "2xH100"])
    assert printed.exit_code == 0, printed.output
    for words in ("2xH100", "copies (DDP)", "shards (FSDP2)", "MFU", "PFLOP", "GiB of gradients"):
        assert words in printed.output
    assert "?" not in printed.output
    for wrong in (["--fit"], ["--devices", "8xH99"]):
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert refused.exit_code != 0 and isinstance(refused.exception, (UserError, SystemExit))
    plain = CliRunner().invoke(app, [*arguments[:-1], "--devices", "2xH100"])
    assert plain.exit_code != 0


@pytest.mark.parametrize(
    ("path", "billions"),
    [
        ("deepseek-community/Janus-Pro-1B", 2.08),
        ("GSAI-ML/LLaDA-8B-Instruct", 8.02),
        ("OpenGVLab/InternVL3-8B-hf", 7.94),
        ("Qwen/Qwen3.5-35B-A3B", 35.1),
        ("amused/amused-256", 0.603),
        ("hub:peizesun/llamagen_t2i/t2i_XL_stage1_256.pt", 0.775),
        ("hub:FoundationVision/var/var_d16.pth", 0.310),
    ],
)
def test_token_models_have_the_sizes_that_are_published(path, billions):
    net = architectures.on_meta(path)
    assert sum(p.numel() for p in net.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)
