"""What families read of a row besides its text: a negative prompt, as diffusers has it; what they
do not read is reported before training."""

import logging

import diffusers
import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import POLICIES, load_built_in
from mmrl.data.by_size import BySize
from mmrl.data.ledger import Summary
from mmrl.experiment import build, evaluation
from mmrl.policies.diffusion import prompt_lengths
from samplers.noise import Rng
from tests.fixtures import tiny_diffusers
from tests.policies.diffusion import test_folder_families as folders

load_built_in()

NEGATIVE = "green moving left"
TEXTS = ["a red seven", "a blue two"]


def plain_pictures(policy, call, **more):
    """Of diffusers' own pipeline, for the first text."""
    pipe = getattr(diffusers, policy.pipeline).from_pretrained(policy.place)
    pipe.set_progress_bar_config(disable=True)
    seeded = torch.Generator().manual_seed(7)
    return pipe(
        TEXTS[0], generator=seeded, num_inference_steps=2, output_type="pt", **call, **more
    )[0]


# settings of a row by the names of the pipeline's call, beside one without any
OWN = {"text": TEXTS[0], "seed": 7, "negative_prompt": NEGATIVE}


@pytest.mark.parametrize(
    ("name", "scales"),
    [
        ("sd", {"guidance_scale": 3.5}),
        ("flux", {"guidance_scale": 6.0, "true_cfg_scale": 2.0}),
        ("hunyuan_video", {"guidance_scale": 4.0, "true_cfg_scale": 2.0}),
    ],
)
def test_a_rows_own_settings_are_those_of_the_pipelines_call(name, scales):
    """Seed, guidance, negative prompt and size of one row; the other keeps the policy's."""
    case = folders.CASES[name]
    policy = folders.make(name, steps=2, fixed_batch_rows=None)
    height, width = 16, 48
    rows = [OWN | scales | {"size": [height, width]}, {"text": TEXTS[1]}]
    policy.admit(rows)
    assert not policy.report.notes or "not read" not in " ".join(policy.report.notes)
    media, _ = evaluation.sample(policy, rows, 1, seed=3)
    sizes = {"height": height, "width": width, "negative_prompt": NEGATIVE}
    theirs = plain_pictures(policy, case.call, **sizes, **scales)
    torch.testing.assert_close(media[0], theirs[0], atol=1e-4, rtol=0)
    plain, _ = evaluation.sample(policy, [{"text": TEXTS[1]}], 1, seed=3)
    torch.testing.assert_close(media[1], plain[0], atol=1e-5, rtol=0)
    if name == "sd":  # the policy's option is for rows that say nothing
        chosen = folders.make(name, steps=2, fixed_batch_rows=None, negative_prompt=NEGATIVE)
        row = {key: value for key, value in rows[0].items() if key != "negative_prompt"}
        again, _ = evaluation.sample(chosen, [row], 1, seed=3)
        torch.testing.assert_close(again[0], theirs[0], atol=1e-4, rtol=0)


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


BROKEN = [
    ({"size": [16, 17]}, "its size 17 is not a multiple of 2"),
    ({"size": "512x512"}, "its size is '512x512', expected pixels of a side"),
    ({"seed": -1}, "its seed is '-1', expected a whole number"),
    ({"guidance_scale": "high"}, "its guidance_scale is 'high', expected a number"),
    ({"negative_prompt": ["blur"]}, "its negative_prompt is \"['blur']\", expected a text"),
]


def test_settings_that_cannot_be_meant_are_refused_in_one_list_and_may_be_left_out():
    """A wrong size of several rows is reported once."""
    policy = folders.make("sd")
    settings = [{}, *(setting for setting, _ in BROKEN), {}, {"size": 17}]
    rows = [{"text": "a", "origin": f"d.jsonl:{i}"} | own for i, own in enumerate(settings, 1)]
    source = build.Admitted(rows, [])
    with pytest.raises(UserError, match="6 of 8 rows are broken") as caught:
        build.admitted(policy, source)
    said = str(caught.value)
    assert all(words in said for _, words in BROKEN) and "(and 1 more rows like it: 8" in said
    assert "d.jsonl:4: its seed" in said and "d.jsonl:5: its guidance_scale" in said
    kept = build.admitted(policy, source, [Summary("d.jsonl", skips=True)]).train
    assert [row["origin"] for row in kept] == ["d.jsonl:1", "d.jsonl:7"]


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


LONG = " ".join(["a red blue green seven two"] * 10) + " zero"


def test_prompts_that_are_cut_are_counted_once_and_the_libraries_are_silent(caplog):
    policy = folders.make("flux")
    prompts = [{"text": LONG}, {"text": "a red seven"}]
    assert policy.admit(prompts) == prompts and policy.admit(prompts) == prompts
    assert len(policy.report.notes) == 2
    told = " | ".join(policy.report.notes)
    for words in ("1 of 2 prompts are longer than the 12 tokens", "tokenizer (CLIP)"):
        assert words in told
    assert "the 16 tokens" in told and "raise policy option text_length" in told
    logging.getLogger("diffusers").propagate = True
    try:
        policy.encode(prompts)
    finally:
        logging.getLogger("diffusers").propagate = False
    assert "truncated" not in caplog.text and "longer than" not in caplog.text
    short = folders.make("flux")
    short.admit([{"text": "a red seven"}])
    assert not short.report.notes


def test_a_pipelines_prompts_are_counted_too():
    place = tiny_diffusers.folder("flux")
    call = {"height": 16, "width": 16, "max_sequence_length": 16}
    policy = POLICIES.build("pipeline", path=str(place), call=call, steps=1, check=False)
    policy.admit([{"text": LONG}, {"text": "a red seven"}])
    lines = [line for line in policy.report.notes if "longer than" in line]
    assert len(lines) == 2 and "the 16 tokens" in lines[1] and "max_sequence_length" in lines[1]


def test_columns_that_look_like_settings_are_mentioned():
    rows = [{"text": "a", "seed": 1, "negativ_prompt": "b", "style": "flat"}]
    (line,) = prompt_lengths.unread(rows, ("negative_prompt",))
    assert "negativ_prompt, seed" in line and "read of a row: negative_prompt" in line
    assert not prompt_lengths.unread([{"text": "a", "negative_prompt": "b"}], ("negative_prompt",))
