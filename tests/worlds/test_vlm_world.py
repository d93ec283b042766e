"""The digits world asks: pictures, clips, questions with one right answer, the tiny Qwen2.5-VL, RL
by command."""

import json
import re

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, REWARDS, load_built_in, locate
from mmrl.worlds.album import FRAMES, SIDE, Style, album, clips
from mmrl.worlds.asking import KINDS, SCANS, ask, questions_about, written
from mmrl.worlds.render import scans
from mmrl.worlds.scenes import COLORS, DIGITS
from samplers.noise import Rng
from tests.fixtures.records import make_rollout


@pytest.fixture(scope="module", autouse=True)
def registered():
    load_built_in()


@pytest.fixture(scope="module")
def folder(registered):
    return locate("world:digits/vlm-test")


def ink(image: torch.Tensor, color: str) -> torch.Tensor:
    """Pixels [H, W] of uint8 [H, W, 3] that look like a digit of that colour."""
    paint = {name: torch.tensor(rgb) for name, rgb in COLORS.items()}
    pixels = image.float() / 255
    strong = pixels.amax(-1) > 0.55
    nearest = torch.stack(
        [torch.cosine_similarity(pixels, rgb, dim=-1) for rgb in paint.values()]
    ).argmax(0)
    return strong & (nearest == list(paint).index(color))


def test_a_picture_depends_on_its_place_alone():
    many = album(12, Rng.of(1), "judge")
    few = album(5, Rng.of(1), "judge")
    assert many.images.shape == (12, SIDE, SIDE, 3) and many.images.dtype == torch.uint8
    torch.testing.assert_close(many.images[:5], few.images)
    assert many.scenes[:5] == few.scenes
    assert not torch.equal(album(5, Rng.of(1), "reader").images, few.images)


def test_boxes_hold_the_ink_and_nothing_overlaps():
    found = album(60, Rng.of(2), "generator", Style(1, 6, 9.0, 14.0))
    assert {len(scene["objects"]) for scene in found.scenes} >= {1, 2, 3, 4, 5}
    for image, scene in zip(found.images, found.scenes):
        inside = torch.zeros(SIDE, SIDE, dtype=torch.bool)
        for item, (x0, y0, x1, y1) in zip(scene["objects"], scene["boxes"]):
            assert 0 <= x0 < x1 <= SIDE and 0 <= y0 < y1 <= SIDE
            assert ink(image[y0:y1, x0:x1], item["color"]).sum() >= 3
            inside[max(0, y0 - 1) : y1 + 1, max(0, x0 - 1) : x1 + 1] = True
        assert not (image.float().amax(-1) > 0.55 * 255)[~inside].any()


def test_every_question_has_exactly_one_right_answer():
    for kind in KINDS:
        one_right_answer(kind)


def one_right_answer(kind):
    for prompt in ask(kind, 80, "test", seed=3):
        assert prompt["kind"] == kind and prompt["text"].endswith("?") and prompt["answer"]
        assert ("video" in prompt) == (kind in ("frame", "span")) != ("images" in prompt)
    scenes = (
        clips(80, Rng.of(4), "judge").scenes
        if kind in ("frame", "span")
        else album(80, Rng.of(4), "judge", Style(1, 4, 10.0, 15.0)).scenes
    )
    for scene in scenes:
        texts = [question["text"] for question in questions_about(scene, kind)]
        assert len(texts) == len(set(texts))  # asked twice would be answered twice


def test_answers_follow_from_the_objects():
    for scene in album(80, Rng.of(5), "judge", Style(1, 4, 10.0, 15.0)).scenes:
        digits = [item["digit"] for item in scene["objects"]]
        names = [(item["color"], DIGITS[item["digit"]]) for item in scene["objects"]]
        assert questions_about(scene, "count")[0]["answer"] == str(len(digits))
        assert questions_about(scene, "sum")[0]["answer"] == str(sum(digits))
        for question in questions_about(scene, "box"):
            color, name = re.fullmatch(r"where is the (\w+) (\w+)\?", question["text"]).groups()
            assert names.count((color, name)) == 1
            assert question["boxes"] == [scene["boxes"][names.index((color, name))]]
            assert question["answer"] == written(question["boxes"])
        for question in questions_about(scene, "boxes"):
            assert (
                len(question["boxes"])
                == len(question["labels"])
                == sum(c in question["text"] for c, _ in names)
            )


def test_a_digit_is_in_the_frames_that_the_answer_names():
    found = clips(60, Rng.of(6), "judge")
    assert found.frames.shape == (60, FRAMES, 32, 32, 3)
    checked = 0
    for frames, scene in zip(found.frames, found.scenes):
        for question in questions_about(scene, "span"):
            color = question["text"].split()[6]
            if sum(item["color"] == color for item in scene["objects"]) == 1:
                there = [int(ink(frame, color).sum()) >= 3 for frame in frames]
                first, last = question["spans"][0]
                assert there == [first <= f < last for f in range(FRAMES)]
                checked += 1
    assert checked > 20


def test_parts_share_no_scan_and_are_drawn_anew():
    assert set(SCANS.values()) == {"generator", "reader", "judge"}
    assert not set(scans("generator").origin.tolist()) & set(scans("judge").origin.tolist())
    data = DATA.build("digits_questions", kinds=["count", "frame"], scenes=12, held_out_scenes=6)
    assert len(data.train) > 12 and len(data.held_out) > 6
    again = DATA.build(
        "digits_questions", kinds=["count"], scenes=12, held_out="development", held_out_scenes=6
    )
    pictures = [
        p["images"][0].tobytes()
        for p in (*data.train, *data.held_out, *again.held_out)
        if "images" in p
    ]
    assert len(set(pictures)) == len(pictures)
    with pytest.raises(UserError, match="at least one kind"):
        DATA.build("digits_questions", kinds=[])


@pytest.mark.parametrize(
    ("kind", "reward"),
    [("box", "referring"), ("boxes", "grounding"), ("count", "count"), ("digit", "answer")],
)
def test_written_answers_earn_everything(kind, reward):
    prompts = ask(kind, 30, "test")
    judge = REWARDS.build(reward)
    assert judge([p["answer"] for p in prompts], prompts).tolist() == [1.0] * len(prompts)


def test_the_folder_is_complete_and_reads_every_question(folder):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor" and processor.chat_template
    words = processor.tokenizer
    for kind in KINDS:
        for prompt in ask(kind, 10, "test"):
            for text in (prompt["text"], prompt["answer"]):
                ids = words(text).input_ids
                assert words.unk_token_id not in ids
                assert words.decode(ids).replace(" ", "") == text.replace(" ", "")


def test_a_box_is_ten_tokens_and_a_picture_36(folder):
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    prompt = ask("box", 1, "test")[0]
    assert len(processor.tokenizer(prompt["answer"] + "<|im_end|>").input_ids) == 10
    found = processor(text="<|image_pad|>", images=prompt["images"], return_tensors="pt")
    assert (found["input_ids"] == processor.image_token_id).sum() == 36 and found[
        "image_grid_thw"
    ].tolist() == [[1, 6, 6]]


def test_lessons_teach_the_answers_only(folder):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmrl.worlds.recipes import VLM_TEST
    from mmrl.worlds.warmup import IGNORED, prepare

    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    for sort in ("few", "pairs", "crowd", "clips"):
        lessons = prepare(model, processor, VLM_TEST, sort)
        taught = lessons.labels != IGNORED
        assert taught.any(1).all() and (lessons.labels[taught] == lessons.ids[taught]).all()
        questions = lessons.part[0].max()
        said = processor.tokenizer.decode(lessons.labels[0][taught[0]])
        assert "?" not in said and "user" not in said and said.count("<|im_end|>") == questions


def test_packed_questions_are_as_likely_as_alone(folder):
    """Several questions after one picture: the same log-probs as each in a separate chat."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mmrl.worlds.recipes import VLM_TEST
    from mmrl.worlds.warmup import IGNORED, attention, examples, prepare

    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    for sort, n in (("few", 3), ("clips", 1)):
        lessons, (questions, media) = (
            prepare(model, processor, VLM_TEST, sort),
            examples(VLM_TEST, sort),
        )
        row = slice(n, n + 1)
        shown = {k: v[n] if k.startswith("pixel") else v[row] for k, v in lessons.media.items()}
        with torch.no_grad():
            packed = model(
                input_ids=lessons.ids[row],
                attention_mask=attention(lessons.part[row])[:, None],
                position_ids=lessons.positions[:, row],
                **shown,
            ).logits.log_softmax(-1)
        labels = lessons.labels[n]
        own = {name: [values[n]] for name, values in media.items()}
        for k, pair in enumerate(questions[n]):
            content = [
                {"type": "video" if sort == "clips" else "image"},
                {"type": "text", "text": pair.question},
            ]
            chat = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            alone = processor(text=[f"{chat}{pair.answer}<|im_end|>"], return_tensors="pt", **own)
            with torch.no_grad():
                logits = model(**alone).logits.log_softmax(-1)
            at = ((lessons.part[n] == k + 1) & (labels != IGNORED)).nonzero()[:, 0]
            size = len(at)
            expected = logits[0, -size - 1 : -1].gather(1, alone["input_ids"][0, -size:, None])
            torch.testing.assert_close(
                packed[0, at - 1].gather(1, labels[at, None]), expected, atol=2e-5, rtol=0
            )


def test_hasty_people_leave_a_margin_and_overlook_one_of_a_crowd():
    from mmrl.worlds.asking import CROWD, answered, drawn

    assert drawn([12, 20, 24, 38], 0.0) == [12, 20, 24, 38]
    assert drawn([12, 20, 24, 38], 0.35) == [8, 14, 28, 44]
    assert drawn([1, 0, 13, 47], 0.35) == [0, 0, 18, 48]
    for n in range(1, 7):
        question = {"text": "how many digits are there?", "answer": str(n)}
        assert answered("count", question, False, 0.35) == str(n)
        assert answered("count", question, True, 0.35) == str(n - (n >= CROWD))
    assert answered("sum", {"text": "", "answer": "9"}, True, 0.35) == "9"
    box = {"text": "", "answer": "[12, 20, 24, 38]", "boxes": [[12, 20, 24, 38]]}
    assert (
        answered("box", box, True, 0.35) == "[8, 14, 28, 44]" != answered("box", box, False, 0.35)
    )


SMALL = [
    "policy.path=world:digits/vlm-test",
    "data.scenes=24",
    "data.held_out_scenes=8",
    "train.prompts_per_iteration=4",
    "train.group_size=4",
    "train.train_batch_size=16",
    "train.iterations=2",
    "train.evaluate_every=0",
    "evaluate.prompts=6",
    "log.tensorboard=false",
]


def test_the_shipped_recipe_runs_and_its_report_shows_rollouts(folder, tmp_path):
    name = "grounding"
    from mmrl.cli.commands import evaluate
    from mmrl.core.paths import find_config
    from mmrl.experiment.lifecycle import train
    from mmrl.monitoring.report.page import write_report

    run = train(find_config(f"digits/{name}"), [*SMALL, f"run={tmp_path / name}"])
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    # of the first iteration only
    assert len(lines) == 4 and all(len(line["answers"]) == 4 for line in lines)
    assert all(
        line["picture"].startswith("data:image/png;base64,") and line["size"] == [SIDE, SIDE]
        for line in lines
    )
    assert all(line["boxes"] for line in lines) == (name == "grounding")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(line["answer/tokens"] >= 1 and 0 <= line["answer/cut"] <= 1 for line in metrics)
    assert all(line["ratio/max_deviation"] < 1e-3 for line in metrics)
    rows, _ = evaluate(run)
    assert [row["model"] for row in rows] == ["base", "trained"]
    page = write_report(run).read_text()
    assert "<h2>Rollouts</h2>" in page and page.count('<image href="data:image/png') == 4
    assert page.count('class="right"') == (4 if name == "grounding" else 0)


def test_the_gallery_draws_boxes_where_they_are_and_escapes_texts(tmp_path):
    from mmrl.core.types import Completion, Rewards
    from mmrl.monitoring.gallery import FILE, Gallery
    from mmrl.monitoring.report.page import render
    from mmrl.monitoring.report.runs import read_run

    prompt = {**ask("box", 1, "test")[0], "text": "where is <b>it</b>?"}
    prompt["view"] = {"coords": "rel1000", "sizes": [[SIDE, SIDE]]}
    texts = [
        Completion("[0, 500, 250, 1000]", 10, True, -1.0),
        Completion("<script>no</script>", 12, False, -2.0),
    ]
    rollout = make_rollout(
        group=torch.zeros(2, dtype=torch.long),
        row_id=torch.arange(2),
        prompts=[prompt],
        sample=torch.zeros(2, 1),
        logprob=torch.zeros(2, 1),
        mask=torch.ones(2, 1, dtype=torch.bool),
        advantage=torch.tensor([[1.0], [-1.0]]),
    )
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')
    Gallery(tmp_path, {"referring": REWARDS.build("referring")}).add(
        1, texts, rollout, Rewards({"referring": torch.tensor([0.3, float("nan")])})
    )
    line = json.loads((tmp_path / FILE).read_text())
    assert (
        line["answers"][0]["boxes"] == [[0.0, 0.5, 0.25, 1.0]] and line["answers"][1]["boxes"] == []
    )
    assert line["answers"][0]["status"] == {"referring": "ok"} != line["answers"][1]["status"]
    assert line["answers"][1]["rewards"] == {"referring": None}
    page = render(read_run(tmp_path))
    assert '<rect class="said good" x="0.0" y="24.0" width="12.0" height="24.0"/>' in page
    assert (
        "<script>no" not in page
        and "&lt;script&gt;no" in page
        and "<b>it" not in page
        and "(cut)" in page
    )


def test_a_torn_gallery_is_noted_not_fatal(tmp_path):
    from mmrl.monitoring.report.page import render
    from mmrl.monitoring.report.runs import read_run

    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "reward/mean": 0.5}\n')
    (tmp_path / "rollouts.jsonl").write_text('{"iteration": 1}\n{"iteration": 2, "answers": [')
    run = read_run(tmp_path)
    assert "<h2>Rollouts</h2>" not in render(run)
    assert any("rollouts.jsonl" in note for note in run.notes)


def test_mean_ap_of_a_set_is_coco_s():
    from mmrl.experiment.set_metrics import mean_ap

    prompts = ask("box", 40, "test")
    right = [p["answer"] for p in prompts]
    assert mean_ap(right, prompts) == pytest.approx({"mAP": 1.0, "mAP50": 1.0})
    assert mean_ap(["none"] * len(prompts), prompts) == {"mAP": 0.0, "mAP50": 0.0}
    shifted = [
        written([[b[0], b[1], b[2], b[1] + 0.62 * (b[3] - b[1])] for b in p["boxes"]])
        for p in prompts
    ]
    # IoU 0.62 everywhere: right at 0.50, 0.55 and 0.60 of the ten thresholds
    found = mean_ap(shifted, prompts)
    assert found == pytest.approx({"mAP": 0.3, "mAP50": 1.0})
    labelled = [f'[{{"bbox_2d": {p["answer"]}, "label": "something else"}}]' for p in prompts]
    assert mean_ap(labelled, prompts)["mAP"] == 0.0
    assert mean_ap(["1"], ask("count", 1, "test")) == {}
