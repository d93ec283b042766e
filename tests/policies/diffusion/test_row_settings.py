"""What families read of a row besides its text: a negative prompt, as diffusers has it; what they
do not read is reported before training."""

import json
import logging

import diffusers
import pytest
import torch
from PIL import Image

from mmrl.apps.dry_run import page
from mmrl.apps.dry_run.dryrun import dry_run
from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.data.by_size import BySize
from mmrl.data.ledger import Summary
from mmrl.experiment import build, evaluation
from mmrl.policies.diffusion import prompt_lengths
from samplers.noise import Rng
from tests.fixtures import command, tiny_diffusers
from tests.policies.diffusion import test_folder_families as folders

load_built_in()

NEGATIVE = "green moving left"
TEXTS = ["a red seven", "a blue two"]


def pictures(policy, prompts):
    with policy.evaluating(2.5), torch.no_grad():
        rollout = policy.rollout(prompts, 1, Rng.of("same"))
        return rollout, policy.decode(rollout)


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_a_negative_prompt_is_the_pipelines(name):
    """By the option, and by a row's own column, which stands before it."""
    own, call = folders.CASES[name].own, folders.CASES[name].call
    torch.manual_seed(0)
    place = str(tiny_diffusers.folder(name))
    made = dict(path=place, steps=2, fixed_batch_rows=None, **own)
    policy = POLICIES.build(name, **made, negative_prompt=NEGATIVE)
    rollout, ours = pictures(policy, [{"text": text} for text in TEXTS])
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(place)
    pipe.set_progress_bar_config(disable=True)
    guide = "true_cfg_scale" if name == "flux" else "guidance_scale"
    more = {"guidance_scale": policy.embedded_guidance} if name == "flux" else {}
    first, (height, width) = rollout.latents.states[:, 0], policy.size
    theirs = pipe(
        TEXTS,
        negative_prompt=[NEGATIVE] * 2,
        latents=folders.pack(first) if name == "flux" else first,
        num_inference_steps=2,
        height=height,
        width=width,
        output_type="pt",
        **{guide: 2.5},
        **call,
        **more,
    )[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    plain = POLICIES.build(name, **made)
    mixed = [{"text": TEXTS[0], "negative_prompt": NEGATIVE}, {"text": TEXTS[1]}]
    _, by_row = pictures(plain, mixed)
    _, without = pictures(plain, [{"text": text} for text in TEXTS])
    torch.testing.assert_close(by_row[0], theirs[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(by_row[1], without[1], atol=1e-4, rtol=0)
    assert not torch.equal(by_row[0], without[0])


# settings of a row by the names of the pipeline's call, beside one without any
OWN = {"text": TEXTS[0], "seed": 7, "negative_prompt": NEGATIVE}


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("sd", {"guidance_scale": 3.5}),
        ("z_image", {"guidance_scale": 3.5}),
        ("flux", {"guidance_scale": 6.0, "true_cfg_scale": 2.0}),
        ("wan-two", {"guidance_scale": 3.5}),
        ("hunyuan_video", {"guidance_scale": 4.0, "true_cfg_scale": 2.0}),
    ],
)
def test_a_rows_own_settings_are_those_of_the_pipelines_call(name, scales):
    """Seed, guidance, negative prompt and size of one row; the other keeps the policy's."""
    own, call = folders.CASES[name].own, folders.CASES[name].call
    policy = POLICIES.build(
        name.partition("-")[0],
        path=str(tiny_diffusers.folder(name)),
        steps=2,
        fixed_batch_rows=None,
        **own,
    )
    size = [16, 48]
    rows = [OWN | scales | {"size": size}, {"text": TEXTS[1]}]
    policy.admit(rows)
    assert not policy.report.notes or "not read" not in " ".join(policy.report.notes)
    media, _ = evaluation.sample(policy, rows, 1, seed=3)
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(policy.place)
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe(
        TEXTS[0],
        negative_prompt=NEGATIVE,
        generator=torch.Generator().manual_seed(7),
        num_inference_steps=2,
        height=size[0],
        width=size[1],
        output_type="pt",
        **scales,
        **call,
    )[0]
    torch.testing.assert_close(media[0], theirs[0], atol=1e-4, rtol=0)
    plain, _ = evaluation.sample(policy, [{"text": TEXTS[1]}], 1, seed=3)
    torch.testing.assert_close(media[1], plain[0], atol=1e-5, rtol=0)


def test_copies_take_further_draws_of_a_seed_and_a_scale_that_is_asked_for_holds():
    policy = folders.make("sd", fixed_batch_rows=None)
    rows = [{"text": TEXTS[0], "seed": 7, "guidance_scale": 3.0}]
    with policy.evaluating(), torch.no_grad():
        first = policy.rollout(rows, 2, Rng.of("any")).latents.states[:, 0]
        after = policy.rollout(rows * 2, 2, Rng.of("other")).latents.states[:, 0]
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(2, *policy.shape, generator=generator)
    torch.testing.assert_close(first, drawn, atol=0, rtol=0)
    torch.testing.assert_close(after, torch.cat([drawn, drawn]), atol=0, rtol=0)
    asked, _ = evaluation.sample(policy, rows, 1, 0, guidance=1.0)
    plain, _ = evaluation.sample(policy, [{"text": TEXTS[0], "seed": 7}], 1, 0)
    own, _ = evaluation.sample(policy, rows, 1, 0)
    torch.testing.assert_close(asked, plain)
    assert not torch.allclose(own, plain)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"size": [16, 17]}, "'a': its size 17 is not a multiple of 2"),
        ({"size": "512x512"}, "'a': its size is '512x512', expected pixels of a side"),
        ({"seed": -1}, "its seed is '-1', expected a whole number"),
        ({"guidance_scale": "high"}, "its guidance_scale is 'high', expected a number"),
        ({"negative_prompt": ["blur"]}, "its negative_prompt is \"['blur']\", expected a text"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_with_their_row(setting, words):
    with pytest.raises(UserError) as caught:
        folders.make("sd").admit([{"text": "a"} | setting])
    assert words in str(caught.value)


def test_all_rows_with_such_settings_are_in_one_list_and_may_be_left_out():
    """Along with what else is wrong with rows; a wrong size of several rows is reported once."""
    policy = folders.make("sd")
    settings = [{"size": 17}, {"seed": -1}, {}, {"size": 17}, {"guidance_scale": "high"}, {}]
    rows = [
        {"text": "a", "origin": f"d.jsonl:{number}"} | own
        for number, own in enumerate(settings, start=1)
    ]
    source = build.Admitted(rows, [])
    with pytest.raises(UserError, match="4 of 6 rows are broken") as caught:
        build.admitted(policy, source)
    said = str(caught.value)
    assert (
        "d.jsonl:1: its size 17 is not a multiple" in said and "(and 1 more rows like it: 4" in said
    )
    assert "d.jsonl:2: its seed" in said and "d.jsonl:5: its guidance_scale" in said
    kept = build.admitted(policy, source, [Summary("d.jsonl", skips=True)]).train
    assert [row["origin"] for row in kept] == ["d.jsonl:3", "d.jsonl:6"]


def test_what_is_wrong_with_pictures_and_settings_of_animated_rows_is_one_list():
    rows = [
        {"text": "a", "image": Image.new("RGB", (20, 20))} | own
        for own in ({}, {"seed": -1}, {"image": None})
    ]
    policy = folders.make("wan_i2v")
    assert policy.admit(rows[:1]) == rows[:1]
    with pytest.raises(UserError, match="2 of 3 rows are broken") as caught:
        build.admitted(policy, build.Admitted(rows, []))
    assert "its seed is '-1'" in str(caught.value) and "image" in str(caught.value)


def test_training_takes_iterations_of_one_size():
    """Each epoch has every row, scores what it sampled to the bit, and mixes no sizes."""
    policy = folders.make("sd", lora=2, guidance_scale=2.0)
    rows = [{"text": text, "size": size} for text in TEXTS for size in (16, [16, 32], [32, 16])]
    policy.admit(rows)
    trainer = folders.trainer_of(policy, iterations=3)
    trainer.prompts = BySize(rows, policy.size_of)
    shapes, seen = set(), []
    for _ in range(3):
        seen += trainer.next_prompts()[0]
        metrics = trainer.iterate()
        shapes.add(policy.shape)
        assert metrics["ratio/max_deviation"] == 0.0 and metrics["grad_norm"] > 0
    assert len(shapes) == 3 and sorted(map(id, seen)) == sorted(map(id, rows))


def test_pictures_in_buckets_are_learned_at_their_sizes(tmp_path):
    """Two iterations of sft, each of one size, and the held-out loss over all sizes."""
    place, buckets = tiny_diffusers.folder("sdxl"), [[8, 32], [32, 8], [16, 16]]
    shapes = [(32, 8), (30, 8), (8, 32), (8, 30), (16, 16), (18, 16)]
    for i, shape in enumerate(shapes):
        Image.new("RGB", shape, (40 * i, 0, 90)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"a red {i} seven")
    (tmp_path / "c.yaml").write_text(
        f"policy: {{sdxl: {{path: {place}, size: 16, steps: 1, lora: 2}}}}\n"
        f"data: {{captions: {{path: {tmp_path}, held_out: 0.5, buckets: {buckets}}}}}\n"
        "objective: sft\nlog: {tensorboard: false}\n"
        "train: {prompts_per_iteration: 2, group_size: 1, train_batch_size: 2, iterations: 3,"
        " evaluate_every: 3, save_every: 0}\n"
    )
    command.mmrl("train", tmp_path / "c.yaml", f"run={tmp_path}/run", cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["grad_norm"] < 100 for row in rows) and 0 < rows[-1]["eval/loss"] < 3


LONG = " ".join(["a red blue green seven two"] * 10) + " zero"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sd", ["1 of 2 prompts are longer than the 12 tokens", "tokenizer (CLIP)"]),
        ("flux", ["tokenizer (CLIP)", "the 16 tokens", "raise policy option text_length"]),
    ],
)
def test_prompts_that_are_cut_are_counted_once_and_the_libraries_are_silent(name, words, caplog):
    policy = folders.make(name)
    prompts = [{"text": LONG}, {"text": "a red seven"}]
    assert policy.admit(prompts) == prompts and policy.admit(prompts) == prompts
    told = " | ".join(policy.report.notes)
    assert all(word in told for word in words) and len(policy.report.notes) == (
        2 if name == "flux" else 1
    )
    logging.getLogger("diffusers").propagate = True
    try:
        policy.encode(prompts)
    finally:
        logging.getLogger("diffusers").propagate = False
    assert "truncated" not in caplog.text and "longer than" not in caplog.text
    short = folders.make(name)
    short.admit([{"text": "a red seven"}])
    assert not short.report.notes


def test_a_pipelines_prompts_and_those_of_the_dry_run_are_counted_too(tmp_path):
    place = tiny_diffusers.folder("flux")
    call = {"height": 16, "width": 16, "max_sequence_length": 16}
    policy = POLICIES.build("pipeline", path=str(place), call=call, steps=1, check=False)
    policy.admit([{"text": LONG}, {"text": "a red seven"}])
    lines = [line for line in policy.report.notes if "longer than" in line]
    assert len(lines) == 2 and "the 16 tokens" in lines[1] and "max_sequence_length" in lines[1]
    (tmp_path / "p.txt").write_text(f"{LONG}\na red seven\n")
    for options in (
        f"flux: {{path: {place}, size: 16, text_length: 16}}",
        f"pipeline: {{path: {place}, call: {call}}}",
    ):
        (tmp_path / "c.yaml").write_text(
            f"policy: {{{options}}}\ndata: {{prompts: {{path: {tmp_path}/p.txt, held_out: 0}}}}\n"
            "reward: {aesthetic: 1.0}\nobjective: policy_gradient\n"
            "train: {prompts_per_iteration: 2, group_size: 2, train_batch_size: 4, iterations: 1}"
        )
        shown = list(page.lines(dry_run(tmp_path / "c.yaml")))
        assert sum(line.startswith("prompts     1 of 2 prompts are longer") for line in shown) == 2


def test_columns_that_look_like_settings_are_mentioned():
    rows = [{"text": "a", "seed": 1, "negativ_prompt": "b", "style": "flat"}]
    (line,) = prompt_lengths.unread(rows, ("negative_prompt",))
    assert "negativ_prompt, seed" in line and "read of a row: negative_prompt" in line
    assert not prompt_lengths.unread([{"text": "a", "negative_prompt": "b"}], ("negative_prompt",))
