"""Rewards of a picture's content: written text, objects, answers to questions."""

from __future__ import annotations

import sys

import pytest
import torch

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from rewards import OCR, TIFA, GenEval, VQAScore
from rewards.base.hf import to_pil
from rewards.base.prompt import from_pil
from rewards.images.detector import Detection, Detector, box_of
from rewards.images.geneval import (
    COLOR_TEXTS,
    COLORS,
    GREY,
    cut,
    detections_by_name,
    published,
    relations,
    training,
)
from rewards.images.ocr import closeness, target_of
from tests.fixtures.tiny_image_rewards import TINY_OPTIONS, save_mask2former, save_yolos
from tests.fixtures.tiny_rewards import TEXTS, asked, pictures, save_tiny_clip
from tests.fixtures.tiny_vlms import folder as vlm

# OCR


def written(*lines: str) -> torch.Tensor:
    """[1, 3, 160, 480]: dark text on white."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (480, 160), "white")
    for i, line in enumerate(lines):
        ImageDraw.Draw(image).text((20, 20 + 60 * i), line, "black", ImageFont.load_default(44))
    return from_pil(image)[None]


@pytest.fixture(scope="module")
def ocr():
    pytest.importorskip("rapidocr_onnxruntime")
    return OCR(threads=1, side=160)


def test_rendered_text_is_read_and_the_wrong_one_is_not(ocr):
    media = torch.cat([written("Hello World"), written("Goodbye"), torch.ones(1, 3, 160, 480)])
    scores = ocr(media, [{"text": 'a sign that says "Hello World"'}] * 3)
    assert scores[0] == 1 and scores[1] < 0.5 and scores[2] == 0
    # more than was asked for is no fault
    assert ocr(written("Big", "Hello World"), [{"text": '"Hello World"'}]) == 1


def test_a_video_is_read_every_fourth_frame_without_mercy_for_more(ocr):
    good = written("HELLO")
    blank = torch.ones(1, 3, 160, 480)
    longer = written("HELLO", "THERE")
    prompt = [{"text": '"hello"'}]

    def video(*frames):
        return ocr(torch.cat(frames)[None], prompt).item()

    assert video(good, *[blank] * 3, blank) == 1  # frames without any of it are not averaged
    assert video(blank, good, good, good) == 0  # only the first is looked at
    assert video(longer) == 0 and ocr(longer, prompt) == 1


def test_the_distance_is_levenshteins_and_at_most_the_length():
    assert closeness("H e L lo", "hello", within=False) == 1
    assert closeness("hexlo!", "hello", within=False) == pytest.approx(1 - 2 / 5)
    assert (
        closeness("xxhelloxx", "hello", within=True) == 1
        and closeness("xxhelloxx", "hello", within=False) < 0.3
    )
    assert closeness("something else entirely", "hello", within=True) == 0
    assert closeness("", "hello", within=True) == 0


def test_the_target_stands_in_quotes_or_in_a_field(monkeypatch):
    assert target_of({"text": 'a "red" and "blue" sign'}, "text") == "red"
    assert target_of({"word": "no quotes"}, "word") == "no quotes"
    for text in ("no quotes", '"open', 'empty ""'):
        with pytest.raises(UserError, match="no text in double quotes"):
            target_of({"text": text}, "text")
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'multimodal-rl\[ocr\]'"):
        OCR()


# GenEval's rules


def at(x: float, y: float, size: float = 10, name: str = "cat", score: float = 0.95) -> Detection:
    return Detection(name, score, torch.tensor([x, y, x + size, y + size]))


def seen(**objects: list[Detection]) -> dict:
    return objects


def always(color: str):
    return lambda objects, name: [color] * len(objects)


def entry(name: str, count: int = 1, **more) -> dict:
    return {"class": name, "count": count, **more}


def test_relations_follow_the_published_thresholds():
    a = at(0, 0).box
    b = at(50, 0).box
    assert relations(a, b) == {"left of"} and relations(b, a) == {"right of"}
    assert relations(at(0, 0).box, at(0, 50).box) == {"above"}
    assert relations(at(0, 0).box, at(40, 40).box) == {"left of", "above"}
    # within a tenth of both sizes
    assert relations(a, a) == set() and relations(at(0, 0).box, at(1.9, 0).box) == set()
    assert relations(at(0, 0).box, at(3.9, 0).box) == set()  # (3.9 - 2) / 3.9 < 0.5
    assert relations(at(0, 0).box, at(4.1, 0).box) == {"left of"}
    torch.manual_seed(0)
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for _ in range(50):
        first, second = (
            at(*(40 * torch.rand(2)).tolist(), size=float(5 + 10 * torch.rand(1))).box for _ in "ab"
        )
        assert {opposite[r] for r in relations(first, second)} == relations(second, first)
        assert relations(3 * first, 3 * second) == relations(first, second)


def test_counts(subtests):
    for cats, wanted, partial, strict, benchmark in [
        (2, 2, 1.0, True, True),
        (3, 2, 0.5, False, True),
        (1, 2, 0.5, False, False),
        (0, 1, 0.0, False, False),
        (5, 1, -3.0, False, True),
    ]:
        with subtests.test(cats=cats, wanted=wanted):
            objects = seen(cat=[at(20 * i, 0) for i in range(cats)])
            prompt = {"include": [entry("cat", wanted)]}
            assert training(objects, prompt, always("red")) == (strict, partial)
            assert published(objects, prompt, always("red")) is benchmark


def test_colours_and_what_a_wrong_count_makes_pointless():
    two = seen(cat=[at(0, 0), at(20, 0)])
    prompt = {"include": [entry("cat", 2, color="red")]}
    assert training(two, prompt, always("red")) == (True, 1.0)
    assert training(two, prompt, lambda o, n: ["red", "blue"]) == (False, (1 + 0.5) / 2)
    # (0 + 0) / 2
    assert training(two, {"include": [entry("cat", 1, color="red")]}, always("red")) == (False, 0.0)
    assert published(two, prompt, always("red")) and not published(two, prompt, always("blue"))
    assert published(
        two, {"include": [entry("cat", 1, color="red")]}, lambda o, n: ["red"]
    )  # only the best is looked at


def test_positions_and_their_half_credit():
    objects = seen(dog=[at(0, 0)], cat=[at(50, 0)])
    for relation, strict, partial in (
        ("right of", True, 1.0),
        ("left of", False, (1 + 1 + 0 + 1) / 4),
    ):
        prompt = {"include": [entry("dog"), entry("cat", position=[relation, 0])]}
        assert training(objects, prompt, always("red")) == (strict, partial)
        assert published(objects, prompt, always("red")) is strict
    gone = {"include": [entry("bird"), entry("cat", position=["right of", 0])]}
    assert training(objects, gone, always("red")) == (False, (0 + 1 + 0) / 3)
    assert not published(objects, gone, always("red"))


def test_only_the_benchmark_looks_at_what_is_excluded():
    objects = seen(cat=[at(0, 0), at(20, 0)])
    prompt = {"include": [entry("cat", 2)], "exclude": [entry("cat", 3)]}
    assert published(objects, prompt, always("red")) and training(objects, prompt, always("red"))[0]
    assert not published(seen(cat=[at(20 * i, 0) for i in range(3)]), prompt, always("red"))


def test_thresholds_and_the_most_of_a_class():
    objects = [at(i, 0, score=0.95 - 0.1 * i) for i in range(8)] + [at(0, 0, name="dog", score=0.2)]
    assert {
        name: len(detections) for name, detections in detections_by_name(objects, 0.3, 16).items()
    } == {"cat": 7}
    assert (
        len(detections_by_name(objects, 0.9, 16)["cat"]) == 1
        and len(detections_by_name(objects, 0.3, 2)["cat"]) == 2
    )


def test_an_object_is_cut_out_with_grey_around_it():
    picture = pictures(1, 12, 16)[0]
    mask = torch.zeros(12, 16, dtype=torch.bool)
    mask[2:5, 3:9] = True
    mask[2, 3] = False
    assert box_of(mask).tolist() == [3, 2, 9, 5]
    crop = cut(picture, Detection("cat", 1.0, box_of(mask), mask))
    assert crop.shape == (3, 3, 6) and torch.equal(crop[:, 1:], picture[:, 3:5, 3:9])
    assert torch.allclose(crop[:, 0, 0], torch.full((3,), GREY))
    assert cut(picture, Detection("cat", 1.0, torch.tensor([16.0, 12.0, 16.0, 12.0]))).shape == (
        3,
        1,
        1,
    )


# GenEval's models


def test_mask2former_finds_what_transformers_does(tmp_path):
    """At its fixed size of 384 its post-processing keeps the same masks and scores."""
    from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

    folder = save_mask2former(tmp_path / "m2f", 384)
    media = (pictures(2, 384, 384) * 255).round() / 255
    detector = Detector(folder, "cpu")
    detections = detector(media)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images=to_pil(media), return_tensors="pt")
    with torch.no_grad():
        outputs = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()(**inputs)
    theirs = processor.post_process_instance_segmentation(
        outputs, threshold=0.0, target_sizes=[(384, 384)] * 2, return_binary_maps=True
    )
    for ours, expected in zip(detections, theirs, strict=True):
        best = sorted((s["score"] for s in expected["segments_info"]), reverse=True)
        assert len(best) >= 3 and {detection.name for detection in ours} <= {
            "cat",
            "tv remote",
            "dog",
        }
        torch.testing.assert_close(
            torch.tensor([detection.score for detection in ours[: len(best)]]),
            torch.tensor(best),
            rtol=1e-5,
            atol=1e-5,
        )
        maps = {
            round(s["score"], 5): expected["segmentation"][s["id"]]
            for s in expected["segments_info"]
        }
        for detection in ours[: len(best)]:
            near = min(maps, key=lambda score: abs(score - detection.score))
            assert (maps[near].bool() != detection.mask).float().mean() < 1e-3


def test_a_detector_gives_boxes_in_pixels_best_first(tmp_path):
    from transformers import AutoImageProcessor, YolosForObjectDetection

    folder = save_yolos(tmp_path / "yolos")
    media = (pictures(3, 40, 48) * 255).round() / 255
    detections = Detector(folder, "cpu")(media)
    alone = Detector(folder, "cpu")(media[1:2])
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images=to_pil(media), return_tensors="pt")
    with torch.no_grad():
        outputs = YolosForObjectDetection.from_pretrained(folder).eval()(
            pixel_values=inputs["pixel_values"]
        )
    chances = outputs.logits.softmax(-1)[..., :-1].amax(-1).sort(dim=1, descending=True).values
    torch.testing.assert_close(
        torch.tensor([[detection.score for detection in row] for row in detections]), chances
    )
    assert {detection.name for row in detections for detection in row} <= {"cat", "computer mouse"}
    boxes = torch.stack([detection.box for row in detections for detection in row])
    assert (boxes >= 0).all() and (boxes[:, 2] <= 48).all() and (boxes[:, 3] <= 40).all()
    assert [detection.score for detection in alone[0]] == pytest.approx(
        [detection.score for detection in detections[1]], abs=1e-5
    )


def test_colours_are_clips_zero_shot_classes(tmp_path):
    import open_clip

    clip = save_tiny_clip(tmp_path / "clip")
    reward = GenEval(save_yolos(tmp_path / "yolos"), clip, device="cpu")
    picture = (pictures(1, 40, 40, seed=3)[0] * 255).round() / 255
    objects = [at(0, 0, 20), at(10, 15, 24), at(5, 3, 12)]
    network, _, transform = open_clip.create_model_and_transforms(f"local-dir:{clip}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{clip}")
    (image,) = to_pil(picture[None])
    with torch.no_grad():
        rows = []
        for color in COLORS:
            words = network.encode_text(
                tokenizer([t.format(color=color, name="cat") for t in COLOR_TEXTS])
            )
            mean = torch.nn.functional.normalize(words, dim=-1).mean(0)
            rows.append(mean / mean.norm())
        crops = torch.stack(
            [transform(image.crop(detection.box.tolist())) for detection in objects]
        )
        expected = (network.eval().encode_image(crops) @ torch.stack(rows).T).argmax(1)
    assert reward.colors(picture, objects, "cat") == [COLORS[i] for i in expected]


def test_geneval_from_end_to_end(tmp_path):
    options = TINY_OPTIONS["geneval"](tmp_path)
    media = pictures(4, 40, 48)
    prompts = [{"include": [entry("computer mouse", 2, color="red")]}] * 4
    reward = GenEval(**options, threshold=0.0)
    values = {}
    for form in ("partial", "strict", "published"):
        reward.form = form
        values[form] = reward(media, prompts)
    assert set(values["strict"].tolist()) | set(values["published"].tolist()) <= {0.0, 1.0}
    detections = reward.detector(media)
    counts = torch.tensor(
        [
            float(
                sum(detection.name == "computer mouse" and detection.score > 0 for detection in row)
            )
            for row in detections
        ]
    )
    off = counts != 2
    torch.testing.assert_close(values["partial"][off], (1 - (counts[off] - 2).abs() / 2) / 2)
    with pytest.raises(UserError, match="knows no class 'mouse'"):
        reward(media[:1], [{"include": [entry("mouse")]}])
    with pytest.raises(UserError, match="`per_frame` with it"):
        reward(media[None], prompts[:1])


# Questions


def test_vqa_score_is_the_models_probability_of_yes():
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = str(vlm("qwen2_vl"))
    media = (pictures(5, 56, 56) * 255).round() / 255
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    tools = AutoProcessor.from_pretrained(path)
    expected = []
    against = []
    for image, text in zip(to_pil(media), TEXTS, strict=True):  # one at a time: no padding
        talk = [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": image},
                    {
                        "type": "text",
                        "text": f'Does this figure show "{text}"? Please answer yes or no.',
                    },
                ],
            }
        ]
        batch = tools.apply_chat_template(
            talk, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            chances = model(**batch).logits[0, -1].softmax(-1)
        expected.append(chances[tools.tokenizer.encode("Yes")[0]])
        against.append(chances[tools.tokenizer.encode("No")[0]])
    expected = torch.stack(expected)
    against = torch.stack(against)
    options = {"model": path, "device": "cpu", "dtype": "float32", "batch_size": 2}
    torch.testing.assert_close(VQAScore(**options)(media, asked()), expected, rtol=1e-4, atol=1e-6)
    fair = VQAScore(**options, normalize=True)(media, asked())
    torch.testing.assert_close(fair, expected / (expected + against), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="begin with the same token"):
        VQAScore(**options, no=["Yes, not"])


def test_tifa_is_the_share_of_right_choices_by_likelihood():
    from transformers import AutoModelForImageTextToText

    path = str(vlm("qwen2_vl"))
    media = (pictures(2, 56, 56) * 255).round() / 255
    reward = TIFA(path, batch_size=3, device="cpu", dtype="float32")
    choices = ["red", "a blue one", "nine"]
    question = "which? Choices: red, a blue one, nine."
    tools = reward.vlm.processor
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    best = []
    for image in to_pil(media):
        scores = []
        for choice in choices:
            start = reward.vlm.write(question)
            batch = tools(text=[start + choice], images=[image], return_tensors="pt")
            labels = batch.input_ids.clone()
            labels[:, : -len(choice)] = -100  # a token a letter
            with torch.no_grad():
                scores.append(-model(**batch, labels=labels).loss)
        best.append(choices[int(torch.stack(scores).argmax())])
    for answer in choices:
        prompts = [
            {"questions": [{"question": "which?", "choices": choices, "answer": answer}]}
        ] * 2
        assert reward(media, prompts).tolist() == [float(text == answer) for text in best]
    questions = [
        {"question": "which?", "choices": choices, "answer": text} for text in (best[0], *choices)
    ]
    assert reward(media[:1], [{"questions": questions}]).item() == pytest.approx(2 / 4)
    with pytest.raises(UserError, match="the answer 'no such' is not among"):
        reward(
            media[:1], [{"questions": [{"question": "?", "choices": ["a"], "answer": "no such"}]}]
        )
    with pytest.raises(UserError, match="needs a 'questions'"):
        REWARDS.build("tifa", model=path, device="cpu", dtype="float32")(media[:1], [{"text": ""}])
