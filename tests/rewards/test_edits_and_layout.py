"""What an edit leaves alone, and texts at their places."""

from __future__ import annotations

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from mmrl.core.errors import UserError
from rewards import ocr_layout, preservation
from rewards.images.ocr_layout import layout_score, overlap
from tests.fixtures.tiny_image_rewards import save_dino
from tests.fixtures.tiny_rewards import pictures


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
    video = media[:, None].expand(-1, 2, -1, -1, -1)
    torch.testing.assert_close(reward(video, [prompt(source, mask)] * 3), scores)
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
    strict = preservation(model=dino, patches=1.0, device="cpu")(media, [prompt(source)] * 3)
    assert (strict[1:] < scores[1:]).all()
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
    assert layout_score(lines, [("open", left), ("HOT", right)], 1.0) == 1.0
    assert layout_score(lines, [("open", right), ("HOT", left)], 1.0) == 0.0
    assert layout_score(lines, [("open", right), ("HOT", left)], 0.0) == 1.0
    # the boxes overlap by a third; one of four letters is missing
    third = (0.25, 0.0, 0.75, 0.5)
    assert layout_score([("OPE", left)], [("OPEN", third)], 0.5) == pytest.approx(
        0.75 * (0.5 + 0.5 / 3)
    )
    assert layout_score(lines, [("open", None)], 1.0) == 1.0
    # a line counts once, and a text without a line counts 0
    assert layout_score([("open", left)], [("open", left), ("open", left)], 0.5) == 0.5
    assert layout_score([], [("open", left)], 0.5) == 0.0
    assert overlap(left, right) == 0.0 and overlap(left, left) == 1.0


def test_a_layout_that_is_none_is_refused(subtests):
    for layout in [
        None,
        [],
        "OPEN",
        [{"text": " "}],
        [{"text": "a", "box": [0, 0, 2, 1]}],
        [{"text": "a", "box": [0.5, 0, 0.2, 1]}],
        [{"text": "a", "box": "0011"}],
        [3],
    ]:
        with subtests.test(layout=layout):
            pytest.importorskip("rapidocr_onnxruntime")
            with pytest.raises(UserError, match="'ocr_layout' needs under 'layout'"):
                ocr_layout(threads=1, side=32)(
                    torch.zeros(1, 3, 8, 8), [{"text": "a", "layout": layout}]
                )


def test_the_engine_reads_lines_at_their_places():
    pytest.importorskip("rapidocr_onnxruntime")
    image = Image.new("RGB", (256, 128), "white")
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(32)
    draw.text((10, 8), "OPEN", "black", font)
    draw.text((140, 80), "MILK", "black", font)
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    media = pixels.view(1, 128, 256, 3).permute(0, 3, 1, 2) / 255
    places = [[0.03, 0.08, 0.38, 0.35], [0.54, 0.65, 0.9, 0.92]]
    reward = ocr_layout(place=1.0, threads=1, side=128)

    def score(boxes):
        pairs = zip(("OPEN", "MILK"), boxes, strict=True)
        return reward(media, [{"layout": [{"text": t, "box": b} for t, b in pairs]}]).item()

    assert score(places) > 0.5 and score(places[::-1]) < 0.05
