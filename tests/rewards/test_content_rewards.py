"""Rewards of a picture's content: written text and its place, objects, faces, answers to questions,
what an edit leaves alone."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as nnf
from PIL import Image, ImageDraw, ImageFont
from torchvision.transforms.v2 import functional as vision

from mmrl.core.errors import UserError
from rewards import OCR, TIFA, GenEval, VQAScore, ocr_layout, preservation
from rewards.base.hf import to_pil
from rewards.base.prompt import from_pil
from rewards.images.detector import Detection, Detector, box_of
from rewards.images.face_identity import FACES, FaceIdentity
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
from rewards.images.ocr_layout import layout_score
from rewards.images.ocr_layout import overlap as layout_overlap
from tests.fixtures.tiny_image_rewards import (
    TINY_OPTIONS,
    save_dino,
    save_mask2former,
    save_owl,
    save_yolos,
)
from tests.fixtures.tiny_rewards import TEXTS, asked, pictures, save_tiny_clip
from tests.fixtures.tiny_vlms import folder as vlm

# OCR


def written(*lines: str) -> torch.Tensor:
    """[1, 3, 160, 480]: dark text on white."""
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


def test_the_distance_is_levenshteins_and_at_most_the_length(subtests):
    for text, within, score in [
        ("H e L lo", False, 1),
        ("hexlo!", False, 1 - 2 / 5),
        ("xxhelloxx", True, 1),
        ("xxhelloxx", False, 1 - 4 / 5),
        ("something else entirely", True, 0),
        ("", True, 0),
    ]:
        with subtests.test(text=text, within=within):
            assert closeness(text, "hello", within=within) == pytest.approx(score)


def test_the_target_stands_in_quotes_or_in_a_field():
    assert target_of({"text": 'a "red" and "blue" sign'}, "text") == "red"
    assert target_of({"word": "no quotes"}, "word") == "no quotes"
    for text in ("no quotes", '"open', 'empty ""'):
        with pytest.raises(UserError, match="no text in double quotes"):
            target_of({"text": text}, "text")


# GenEval's rules


def at(x: float, y: float, size: float = 10, name: str = "cat", score: float = 0.95) -> Detection:
    return Detection(name, score, torch.tensor([x, y, x + size, y + size]))


def always(color: str):
    return lambda objects, name: [color] * len(objects)


def entry(name: str, count: int = 1, **more) -> dict:
    return {"class": name, "count": count, **more}


def test_relations_follow_the_published_thresholds(subtests):
    for x, y, names in [
        (50, 0, {"left of"}),
        (-50, 0, {"right of"}),
        (0, 50, {"above"}),
        (40, 40, {"left of", "above"}),
        (0, 0, set()),
        (1.9, 0, set()),  # within a tenth of both sizes
        (3.9, 0, set()),  # (3.9 - 2) / 3.9 < 0.5
        (4.1, 0, {"left of"}),
    ]:
        with subtests.test(x=x, y=y):
            assert relations(at(0, 0).box, at(x, y).box) == names
            assert relations(3 * at(0, 0).box, 3 * at(x, y).box) == names


def test_counts(subtests):
    for cats, wanted, partial, strict, benchmark in [
        (2, 2, 1.0, True, True),
        (3, 2, 0.5, False, True),
        (1, 2, 0.5, False, False),
        (0, 1, 0.0, False, False),
        (5, 1, -3.0, False, True),
    ]:
        with subtests.test(cats=cats, wanted=wanted):
            objects = {"cat": [at(20 * i, 0) for i in range(cats)]}
            prompt = {"include": [entry("cat", wanted)]}
            assert training(objects, prompt, always("red")) == (strict, partial)
            assert published(objects, prompt, always("red")) is benchmark


def test_colours_and_what_a_wrong_count_makes_pointless():
    two = {"cat": [at(0, 0), at(20, 0)]}
    both, single = ({"include": [entry("cat", n, color="red")]} for n in (2, 1))
    assert training(two, both, always("red")) == (True, 1.0)
    assert training(two, both, lambda o, n: ["red", "blue"]) == (False, (1 + 0.5) / 2)
    assert training(two, single, always("red")) == (False, 0.0)
    assert published(two, both, always("red")) and not published(two, both, always("blue"))
    assert published(two, single, lambda o, n: ["red"])  # only the best is looked at


def test_positions_and_their_half_credit():
    objects = {"dog": [at(0, 0)], "cat": [at(50, 0)]}
    for first, relation, strict, partial in (
        ("dog", "right of", True, 1.0),
        ("dog", "left of", False, (1 + 1 + 0 + 1) / 4),
        ("bird", "right of", False, (0 + 1 + 0) / 3),
    ):
        prompt = {"include": [entry(first), entry("cat", position=[relation, 0])]}
        assert training(objects, prompt, always("red")) == (strict, partial)
        assert published(objects, prompt, always("red")) is strict


def test_only_the_benchmark_looks_at_what_is_excluded():
    prompt = {"include": [entry("cat", 2)], "exclude": [entry("cat", 3)]}
    for count in (2, 3):
        objects = {"cat": [at(20 * i, 0) for i in range(count)]}
        assert published(objects, prompt, always("red")) is (count == 2)
    assert training(objects, prompt, always("red"))[1] == 0.5


def test_thresholds_and_the_most_of_a_class():
    objects = [at(i, 0, score=0.95 - 0.1 * i) for i in range(8)] + [at(0, 0, name="dog", score=0.2)]
    for threshold, most, count in ((0.3, 16, 7), (0.9, 16, 1), (0.3, 2, 2)):
        found = detections_by_name(objects, threshold, most)
        assert {name: len(rows) for name, rows in found.items()} == {"cat": count}


def test_an_object_is_cut_out_with_grey_around_it():
    picture = pictures(1, 12, 16)[0]
    mask = torch.zeros(12, 16, dtype=torch.bool)
    mask[2:5, 3:9] = True
    mask[2, 3] = False
    assert box_of(mask).tolist() == [3, 2, 9, 5]
    crop = cut(picture, Detection("cat", 1.0, box_of(mask), mask))
    assert crop.shape == (3, 3, 6) and torch.equal(crop[:, 1:], picture[:, 3:5, 3:9])
    assert torch.allclose(crop[:, 0, 0], torch.full((3,), GREY))
    outside = Detection("cat", 1.0, torch.tensor([16.0, 12.0, 16.0, 12.0]))
    assert cut(picture, outside).shape == (3, 1, 1)


# GenEval's models


def test_mask2former_finds_what_transformers_does(tmp_path):
    """At its fixed size of 384 its post-processing keeps the same masks and scores."""
    from transformers import AutoImageProcessor, Mask2FormerForUniversalSegmentation

    folder = save_mask2former(tmp_path / "m2f", 384)
    media = (pictures(2, 384, 384) * 255).round() / 255
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images=to_pil(media), return_tensors="pt")
    with torch.no_grad():
        outputs = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()(**inputs)
    theirs = processor.post_process_instance_segmentation(
        outputs, threshold=0.0, target_sizes=[(384, 384)] * 2, return_binary_maps=True
    )
    for ours, expected in zip(Detector(folder, "cpu")(media), theirs, strict=True):
        segments = sorted(expected["segments_info"], key=lambda s: -s["score"])
        assert len(segments) >= 3
        assert {detection.name for detection in ours} <= {"cat", "tv remote", "dog"}
        for detection, segment in zip(ours, segments):
            assert detection.score == pytest.approx(segment["score"], rel=1e-5, abs=1e-5)
            there = expected["segmentation"][segment["id"]].bool()
            assert (there != detection.mask).float().mean() < 1e-3


def test_a_detector_gives_boxes_in_pixels_best_first(tmp_path):
    from transformers import AutoImageProcessor, YolosForObjectDetection

    folder = save_yolos(tmp_path / "yolos")
    media = (pictures(3, 40, 48) * 255).round() / 255
    rows = Detector(folder, "cpu")(media)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images=to_pil(media), return_tensors="pt")
    with torch.no_grad():
        model = YolosForObjectDetection.from_pretrained(folder).eval()
        logits = model(pixel_values=inputs["pixel_values"]).logits
    chances = logits.softmax(-1)[..., :-1].amax(-1).sort(dim=1, descending=True).values
    torch.testing.assert_close(torch.tensor([[d.score for d in row] for row in rows]), chances)
    assert {d.name for row in rows for d in row} <= {"cat", "computer mouse"}
    boxes = torch.stack([d.box for row in rows for d in row])
    assert (boxes >= 0).all() and (boxes[:, 2] <= 48).all() and (boxes[:, 3] <= 40).all()


def test_colours_are_clips_zero_shot_classes(tmp_path):
    import open_clip

    clip = save_tiny_clip(tmp_path / "clip")
    reward = GenEval(save_yolos(tmp_path / "yolos"), clip, device="cpu")
    picture = (pictures(1, 40, 40, seed=3)[0] * 255).round() / 255
    objects = [at(0, 0, 20), at(10, 15, 24), at(5, 3, 12)]
    network, _, transform = open_clip.create_model_and_transforms(f"local-dir:{clip}")
    tokenizer = open_clip.get_tokenizer(f"local-dir:{clip}")
    (image,) = to_pil(picture[None])
    rows = []
    with torch.no_grad():
        for color in COLORS:
            texts = [text.format(color=color, name="cat") for text in COLOR_TEXTS]
            words = network.encode_text(tokenizer(texts))
            mean = torch.nn.functional.normalize(words, dim=-1).mean(0)
            rows.append(mean / mean.norm())
        crops = torch.stack([transform(image.crop(thing.box.tolist())) for thing in objects])
        expected = (network.eval().encode_image(crops) @ torch.stack(rows).T).argmax(1)
    assert reward.colors(picture, objects, "cat") == [COLORS[i] for i in expected]


def test_geneval_from_end_to_end(tmp_path):
    reward = GenEval(**TINY_OPTIONS["geneval"](tmp_path), threshold=0.0)
    media = pictures(4, 40, 48)
    found = [[d for d in row if d.name == "computer mouse"] for row in reward.detector(media)]
    counts = torch.tensor([float(sum(d.score > 0 for d in row)) for row in found])
    values = reward(media, [{"include": [entry("computer mouse", 2, color="red")]}] * 4)
    off = counts != 2
    torch.testing.assert_close(values[off], (1 - (counts[off] - 2).abs() / 2) / 2)
    with pytest.raises(UserError, match="knows no class 'mouse'"):
        reward(media[:1], [{"include": [entry("mouse")]}])


# Questions


def test_vqa_score_is_the_models_probability_of_yes():
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = str(vlm("qwen2_vl"))
    media = (pictures(5, 56, 56) * 255).round() / 255
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    tools = AutoProcessor.from_pretrained(path)
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    rows = []
    for image, text in zip(to_pil(media), TEXTS, strict=True):  # one at a time: no padding
        words = f'Does this figure show "{text}"? Please answer yes or no.'
        parts = [{"type": "image", "image": image}, {"type": "text", "text": words}]
        talk = [{"role": "user", "content": parts}]
        batch = tools.apply_chat_template(talk, return_tensors="pt", **form)
        with torch.no_grad():
            rows.append(model(**batch).logits[0, -1].softmax(-1))
    tokens = [tools.tokenizer.encode(word)[0] for word in ("Yes", "No")]
    yes, no = torch.stack(rows)[:, tokens].T
    options = {"model": path, "device": "cpu", "dtype": "float32", "batch_size": 2}
    torch.testing.assert_close(VQAScore(**options)(media, asked()), yes, rtol=1e-4, atol=1e-6)
    fair = VQAScore(**options, normalize=True)(media, asked())
    torch.testing.assert_close(fair, yes / (yes + no), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="begin with the same token"):
        VQAScore(**options, no=["Yes, not"])


def test_tifa_is_the_share_of_right_choices_by_likelihood():
    from transformers import AutoModelForImageTextToText

    path = str(vlm("qwen2_vl"))
    media = (pictures(2, 56, 56) * 255).round() / 255
    reward = TIFA(path, batch_size=3, device="cpu", dtype="float32")
    choices = ["red", "a blue one", "nine"]
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    start = reward.vlm.write("which? Choices: red, a blue one, nine.")
    best = []
    for image in to_pil(media):
        losses = []
        for choice in choices:
            batch = reward.vlm.processor(text=[start + choice], images=[image], return_tensors="pt")
            labels = batch.input_ids.clone()
            labels[:, : -len(choice)] = -100  # a token a letter
            with torch.no_grad():
                losses.append(float(model(**batch, labels=labels).loss))
        best.append(choices[losses.index(min(losses))])

    def asks(*answers, choices=choices):
        question = {"question": "which?", "choices": choices}
        return {"questions": [question | {"answer": answer} for answer in answers]}

    for answer in choices:
        right = [float(answer == text) for text in best]
        assert reward(media, [asks(answer)] * 2).tolist() == right
    assert reward(media[:1], [asks(best[0], *choices)]).item() == pytest.approx(2 / 4)
    with pytest.raises(UserError, match="the answer 'no such' is not among"):
        reward(media[:1], [asks("no such", choices=["a"])])
    with pytest.raises(UserError, match="needs a 'questions'"):
        reward(media[:1], [{"text": ""}])


# edits and places of texts


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return save_dino(tmp_path_factory.mktemp("dino"))


def prompt(source, mask=None):
    return {"text": "make it red", "image": source} | ({} if mask is None else {"mask": mask})


def test_only_what_lies_outside_the_mask_counts():
    reward = preservation(model=None, device="cpu")
    (source,) = pictures(1, 32, 32)
    mask = torch.zeros(3, 32, 32)
    mask[:, :16] = 1.0
    inside, outside = source.clone(), source.clone()
    inside[:, :16] = 1 - inside[:, :16]
    outside[:, 16:] = (outside[:, 16:] + 0.25).clamp(max=1.25)
    media = torch.stack([source, inside, outside])
    scores = reward(media, [prompt(source, mask)] * 3)
    assert scores.tolist() == pytest.approx([1.0, 1.0, 0.75], abs=1e-5)
    with pytest.raises(UserError, match="covers the whole picture"):
        reward(media[:1], [prompt(source, torch.ones(3, 32, 32))])
    with pytest.raises(UserError, match="has no 'mask'"):
        reward(media[:1], [prompt(source)])
    larger = torch.nn.functional.interpolate(source[None], scale_factor=2)[0]
    assert reward(media[:1], [prompt(larger, mask)]).item() > 0.95


def test_without_a_mask_the_patches_that_changed_least_count(dino):
    reward = preservation(model=dino, device="cpu")
    source, another = pictures(2, 32, 32)
    half = source.clone()
    half[:, :, :8] = another[:, :, :8]
    media = torch.stack([source, half, another])
    scores = reward(media, [prompt(source)] * 3)
    assert scores[0] == pytest.approx(1.0, abs=1e-5) and scores[0] > scores[1] > scores[2]
    # by the formula, on the patches of one picture
    features = [reward.places(p[None])[0] for p in (source, half)]
    alike = torch.cosine_similarity(*features, -1).sort(descending=True).values
    count = round(0.75 * len(alike))
    assert scores[1].item() == pytest.approx(float(alike[:count].mean()), abs=1e-5)
    # masks and none in one batch
    mask = torch.zeros(3, 32, 32)
    mixed = reward(media[1:], [prompt(source, mask), prompt(source)])
    assert mixed[0] == pytest.approx(1 - float((half - source).square().mean().sqrt()), abs=1e-5)
    assert mixed[1] == pytest.approx(scores[2].item(), abs=1e-5)


def test_the_layout_of_texts_by_hand():
    left, right = (0.0, 0.0, 0.5, 0.5), (0.5, 0.0, 1.0, 0.5)
    lines = [("OPEN", left), ("hot", right)]
    third = (0.25, 0.0, 0.75, 0.5)  # of both boxes
    for read, wanted, place, value in (
        (lines, [("open", left), ("HOT", right)], 1.0, 1),
        (lines, [("open", right), ("HOT", left)], 1.0, 0),
        (lines, [("open", right), ("HOT", left)], 0.0, 1),
        ([("OPE", left)], [("OPEN", third)], 0.5, 0.75 * (0.5 + 0.5 / 3)),
        (lines, [("open", None)], 1.0, 1),
        ([("open", left)], [("open", left), ("open", left)], 0.5, 0.5),  # a line counts once
        ([], [("open", left)], 0.5, 0),
    ):
        assert layout_score(read, wanted, place) == pytest.approx(value)
    assert layout_overlap(left, right) == 0.0 and layout_overlap(left, left) == 1.0


def test_a_layout_that_is_none_is_refused(subtests):
    pytest.importorskip("rapidocr_onnxruntime")
    reward = ocr_layout(threads=1, side=32)
    boxes = ([0, 0, 2, 1], [0.5, 0, 0.2, 1], "0011")
    broken = [[{"text": "a", "box": box}] for box in boxes]
    for layout in (None, [], "OPEN", [{"text": " "}], [3], *broken):
        says = pytest.raises(UserError, match="'ocr_layout' needs under 'layout'")
        with subtests.test(layout=layout), says:
            reward(torch.zeros(1, 3, 8, 8), [{"text": "a", "layout": layout}])


def test_the_engine_reads_lines_at_their_places():
    pytest.importorskip("rapidocr_onnxruntime")
    image = Image.new("RGB", (256, 128), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(32)
    draw.text((10, 8), "OPEN", "black", font)
    draw.text((140, 80), "MILK", "black", font)
    media = from_pil(image)[None]
    places = [[0.03, 0.08, 0.38, 0.35], [0.54, 0.65, 0.9, 0.92]]
    reward = ocr_layout(place=1.0, threads=1, side=128)

    def score(boxes):
        pairs = zip(("OPEN", "MILK"), boxes, strict=True)
        return reward(media, [{"layout": [{"text": t, "box": b} for t, b in pairs]}]).item()

    assert score(places) > 0.5 and score(places[::-1]) < 0.05


# faces


@pytest.fixture(scope="module")
def face_options(tmp_path_factory):
    return TINY_OPTIONS["face_identity"](tmp_path_factory.mktemp("faces"))


@pytest.fixture(scope="module")
def reward(face_options):
    return FaceIdentity(**face_options, margin=0.0)


def largest(found):
    """By a loop: the face of the most area, of equal ones the most certain."""
    best, most = None, 0.0
    for detection in found:
        left, top, right, bottom = detection.box.tolist()
        if detection.name == "human face" and (right - left) * (bottom - top) > most:
            best, most = detection.box, (right - left) * (bottom - top)
    return best


def test_the_largest_faces_are_compared_by_the_models_own_embeddings(reward, face_options):
    """Cut out and resized by torchvision, embedded by timm."""
    media, references = pictures(4, 40, 48), pictures(4, 44, 44, seed=7)
    model = timm.create_model(f"local-dir:{face_options['model']}", pretrained=True).eval()

    def embedded(picture, box):
        left, top, right, bottom = box.tolist()
        side = max(right - left, bottom - top)
        edges = [(left + right - side) / 2, (top + bottom - side) / 2]
        first = [int(torch.tensor(edge).floor()) for edge in edges]
        last = [int(torch.tensor(edge + side).ceil()) for edge in edges]
        padded = vision.pad(picture, 99, padding_mode="edge")
        size = [last[1] - first[1], last[0] - first[0]]
        square = vision.crop(padded, first[1] + 99, first[0] + 99, *size)
        face = vision.resize(square, [32, 32], antialias=True)
        with torch.no_grad():
            return model(vision.normalize(face, [0.5] * 3, [0.5] * 3)[None])[0]

    def face(picture):
        return embedded(picture, largest(reward.detector(picture[None])[0]))

    pairs = zip(media, references, strict=True)
    expected = [nnf.cosine_similarity(face(a), face(b), dim=0) for a, b in pairs]
    scores = reward(media, [{"reference": picture} for picture in references])
    torch.testing.assert_close(scores, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert scores.std() > 0


def test_no_face_no_detector_of_faces_and_no_model(face_options, tmp_path):
    reward = FaceIdentity(**(face_options | {"threshold": 1.0}), missing=-0.5)
    assert reward.score(pictures(2), torch.eye(2, 16)).tolist() == [-0.5, -0.5]
    with pytest.raises(UserError, match="no face was found in a picture of 32 x 32 pixels in the"):
        reward(pictures(1), [{"reference": pictures(1)[0]}])
    cats = save_yolos(tmp_path / "cats")
    with pytest.raises(UserError, match="knows no faces, but cat, computer mouse; take one"):
        FaceIdentity(**(face_options | {"detector": cats}))
    with pytest.raises(UserError, match="cannot load .* as a model of timm"):
        FaceIdentity(**(face_options | {"model": cats}))


def test_an_open_detector_is_asked_for_faces(tmp_path):
    """Its boxes are those of transformers' own post-processing."""
    from transformers import Owlv2ForObjectDetection, Owlv2Processor

    folder = save_owl(tmp_path / "owl")
    media = (pictures(2, 48, 48) * 255).round() / 255
    rows = Detector(folder, "cpu", names=FACES)(media)
    assert {detection.name for row in rows for detection in row} == {"human face"}
    processor = Owlv2Processor.from_pretrained(folder)
    queries = [["a photo of a human face"]] * 2
    inputs = processor(text=queries, images=to_pil(media), return_tensors="pt")
    with torch.no_grad():
        outputs = Owlv2ForObjectDetection.from_pretrained(folder).eval()(**inputs)
    official = processor.post_process_grounded_object_detection(
        outputs, threshold=0.0, target_sizes=[(48, 48)] * 2
    )
    best = official[1]["boxes"][official[1]["scores"].argmax()].clamp(0, 48)
    torch.testing.assert_close(rows[1][0].box, best, rtol=1e-4, atol=1e-2)
