"""The digits world asks: pictures, clips, questions with one right answer, the tiny Qwen2.5-VL."""

import json
import re

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, REWARDS, load_built_in, locate
from mmrl.core.types import Completion, Rewards
from mmrl.experiment.set_metrics import mean_ap
from mmrl.monitoring.gallery import FILE, Gallery
from mmrl.monitoring.report.page import render
from mmrl.monitoring.report.runs import read_run
from mmrl.worlds.album import FRAMES, SIDE, Style, album, clips
from mmrl.worlds.asking import KINDS, SCANS, ask, questions_about, written
from mmrl.worlds.recipes import VLM_TEST
from mmrl.worlds.render import scans
from mmrl.worlds.scenes import COLORS, DIGITS
from mmrl.worlds.warmup import IGNORED, attention, examples, prepare
from samplers.noise import Rng
from tests.fixtures.records import make_rollout

load_built_in()
JUDGE = Rng.of(4), "judge"


def ink(image: torch.Tensor, color: str) -> torch.Tensor:
    """Pixels [H, W] of uint8 [H, W, 3] that look like a digit of that colour."""
    paint = {name: torch.tensor(rgb) for name, rgb in COLORS.items()}
    pixels = image.float() / 255
    strong = pixels.amax(-1) > 0.55
    near = [torch.cosine_similarity(pixels, rgb, dim=-1) for rgb in paint.values()]
    return strong & (torch.stack(near).argmax(0) == list(paint).index(color))


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
            count = sum(color in question["text"] for color, _ in names)
            assert len(question["boxes"]) == len(question["labels"]) == count


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_question_has_exactly_one_right_answer(kind):
    of_clips = kind in ("frame", "span")
    for prompt in ask(kind, 80, "test", seed=3):
        assert prompt["kind"] == kind and prompt["text"].endswith("?") and prompt["answer"]
        assert ("video" in prompt) == of_clips != ("images" in prompt)
    found = clips(80, *JUDGE) if of_clips else album(80, *JUDGE, Style(1, 4, 10.0, 15.0))
    for scene in found.scenes:
        texts = [question["text"] for question in questions_about(scene, kind)]
        assert len(texts) == len(set(texts))  # asked twice would be answered twice
    reward = {"box": "referring", "boxes": "grounding", "count": "count", "digit": "answer"}
    if kind in reward:
        prompts = ask(kind, 30, "test")
        scores = REWARDS.build(reward[kind])([p["answer"] for p in prompts], prompts)
        assert scores.tolist() == [1.0] * len(prompts)


def test_parts_share_no_scan_and_pictures_depend_on_their_place_alone():
    many, few = album(12, *JUDGE), album(5, *JUDGE)
    assert many.images.shape == (12, SIDE, SIDE, 3) and many.images.dtype == torch.uint8
    torch.testing.assert_close(many.images[:5], few.images)
    assert many.scenes[:5] == few.scenes
    assert set(SCANS.values()) == {"generator", "reader", "judge"}
    assert not set(scans("generator").origin.tolist()) & set(scans("judge").origin.tolist())
    asked = {"kinds": ["count", "frame"], "scenes": 12, "held_out_scenes": 6}
    data = DATA.build("digits_questions", **asked)
    again = DATA.build("digits_questions", **asked, held_out="development")
    every = [*data.train, *data.held_out, *again.held_out]
    pictures = [p["images"][0].tobytes() for p in every if "images" in p]
    assert len(set(pictures)) == len(pictures)
    with pytest.raises(UserError, match="at least one kind"):
        DATA.build("digits_questions", kinds=[])


# --------------------------------------------------------------------------------------------------
# the tiny Qwen2.5-VL


@pytest.fixture(scope="module")
def parts():
    """The model and the processor of transformers, from the folder."""
    place = locate("world:digits/vlm-test")
    model = AutoModelForImageTextToText.from_pretrained(place)
    return model, AutoProcessor.from_pretrained(place)


def test_the_folder_is_complete_and_reads_every_question(parts):
    model, processor = parts
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(processor).__name__ == "Qwen2_5_VLProcessor" and processor.chat_template
    words = processor.tokenizer
    for prompt in (prompt for kind in KINDS for prompt in ask(kind, 10, "test")):
        for text in (prompt["text"], prompt["answer"]):
            ids = words(text).input_ids
            assert words.unk_token_id not in ids
            assert words.decode(ids).replace(" ", "") == text.replace(" ", "")
    prompt = ask("box", 1, "test")[0]
    assert len(words(prompt["answer"] + "<|im_end|>").input_ids) == 10
    found = processor(text="<|image_pad|>", images=prompt["images"], return_tensors="pt")
    assert (found["input_ids"] == processor.image_token_id).sum() == 36
    assert found["image_grid_thw"].tolist() == [[1, 6, 6]]


@pytest.mark.parametrize(("sort", "n"), [("few", 3), ("clips", 1), ("pairs", 0), ("crowd", 0)])
@torch.no_grad()
def test_lessons_teach_answers_only_as_likely_as_alone(parts, sort, n):
    """Several questions after one picture have the log-probs of each in a separate chat."""
    model, processor = parts
    lessons = prepare(model, processor, VLM_TEST, sort)
    questions, media = examples(VLM_TEST, sort)
    taught = lessons.labels != IGNORED
    assert taught.any(1).all() and (lessons.labels[taught] == lessons.ids[taught]).all()
    said = processor.tokenizer.decode(lessons.labels[0][taught[0]])
    assert "?" not in said and "user" not in said
    assert said.count("<|im_end|>") == lessons.part[0].max()
    row = slice(n, n + 1)
    shown = {k: v[n] if k.startswith("pixel") else v[row] for k, v in lessons.media.items()}
    packed = model(
        input_ids=lessons.ids[row],
        attention_mask=attention(lessons.part[row])[:, None],
        position_ids=lessons.positions[:, row],
        **shown,
    ).logits.log_softmax(-1)
    own = {name: [values[n]] for name, values in media.items()}
    kind = {"type": "video" if sort == "clips" else "image"}
    for k, pair in enumerate(questions[n]):
        talk = [{"role": "user", "content": [kind, {"type": "text", "text": pair.question}]}]
        chat = processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        alone = processor(text=[f"{chat}{pair.answer}<|im_end|>"], return_tensors="pt", **own)
        logits = model(**alone).logits.log_softmax(-1)
        at = ((lessons.part[n] == k + 1) & taught[n]).nonzero()[:, 0]
        size = len(at)
        expected = logits[0, -size - 1 : -1].gather(1, alone["input_ids"][0, -size:, None])
        found = packed[0, at - 1].gather(1, lessons.labels[n][at, None])
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


# --------------------------------------------------------------------------------------------------
# reports


def test_the_gallery_draws_boxes_where_they_are_and_escapes_texts(tmp_path):
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
    rewards = Rewards({"referring": torch.tensor([0.3, float("nan")])})
    Gallery(tmp_path, {"referring": REWARDS.build("referring")}).add(1, texts, rollout, rewards)
    first, second = json.loads((tmp_path / FILE).read_text())["answers"]
    assert first["boxes"] == [[0.0, 0.5, 0.25, 1.0]] and second["boxes"] == []
    assert first["status"] == {"referring": "ok"} != second["status"]
    assert second["rewards"] == {"referring": None}
    page = render(read_run(tmp_path))
    assert '<rect class="said good" x="0.0" y="24.0" width="12.0" height="24.0"/>' in page
    assert "<script>no" not in page and "&lt;script&gt;no" in page
    assert "<b>it" not in page and "(cut)" in page
    (tmp_path / FILE).write_text('{"iteration": 1}\n{"iteration": 2, "answers": [')  # torn
    run = read_run(tmp_path)
    assert "<h2>Rollouts</h2>" not in render(run) and any(FILE in note for note in run.notes)


def test_mean_ap_of_a_set_is_coco_s():
    prompts = ask("box", 40, "test")
    boxes = [[b[0], b[1], b[2], b[1] + 0.62 * (b[3] - b[1])] for p in prompts for b in p["boxes"]]
    named = [f'[{{"bbox_2d": {p["answer"]}, "label": "something else"}}]' for p in prompts]
    for answers, expected in (
        ([p["answer"] for p in prompts], (1.0, 1.0)),
        (["none"] * len(prompts), (0.0, 0.0)),
        # IoU 0.62 everywhere: right at 0.50, 0.55 and 0.60 of the ten thresholds
        ([written([box]) for box in boxes], (0.3, 1.0)),
        (named, (0.0, 0.0)),
    ):
        found = mean_ap(answers, prompts)
        assert (found["mAP"], found["mAP50"]) == pytest.approx(expected)
    assert mean_ap(["1"], ask("count", 1, "test")) == {}
