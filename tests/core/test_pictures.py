"""Pictures as they are in the wild become what people expect: upright 8-bit RGB, or a sentence."""

import io

import numpy as np
import pytest
from PIL import Image

from mmrl.core.media import pictures
from mmrl.core.media.pictures import (
    PictureError,
    check_size,
    eight_bits,
    full_size,
    limit,
    note_of,
    opened,
    raise_limit,
    rgb_picture,
    upright_size,
)

RED = (200, 30, 40)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(source, at=(1, 1)):
    return rgb_picture(source).getpixel(at)


def test_modes_of_eight_bits_and_transparency_on_white():
    assert pixel(encoded(Image.new("L", (4, 4), 77))) == (77, 77, 77)
    assert pixel(encoded(Image.new("1", (4, 4), 1))) == (255, 255, 255)
    palette = Image.new("RGB", (4, 4), RED).convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixel(encoded(palette)) == RED
    assert pixel(Image.new("RGB", (4, 4), RED)) == RED
    near = pixel(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert near[0] > 240 and max(near[1:]) < 15
    assert pixel(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 0)))) == (255, 255, 255)
    half = pixel(encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128))))
    assert half[0] == 255 and 120 < half[1] < 135
    assert pixel(encoded(Image.new("LA", (4, 4), (0, 0)))) == (255, 255, 255)
    palette = Image.new("P", (4, 4))
    assert pixel(encoded(palette, transparency=0)) == (255, 255, 255)


def test_more_than_eight_bits_are_scaled_by_their_range(subtests):
    for kind in ["PNG", "TIFF"]:
        for bits in [10, 12, 16]:
            with subtests.test(kind=kind, bits=bits):
                values = np.linspace(0, 2**bits - 1, 64 * 64).reshape(64, 64).astype(np.uint16)
                content = encoded(Image.fromarray(values), kind)
                shown = np.asarray(rgb_picture(content))[..., 0].astype(float)
                assert np.abs(shown - values.astype(float) * 255 / (2**bits - 1)).max() <= 1
                assert (shown == 255).mean() < 0.01, "they are not white"
                assert note_of(opened(content)) == "more than 8 bits a value, scaled by their range"


def test_ranges_of_numbers():
    def scaled(*values, dtype=np.float32):
        return eight_bits(np.array([values], dtype=dtype))[0].tolist()

    assert scaled(0.0, 0.5, 1.0) == [0, 128, 255]
    assert scaled(0, 100, 255, dtype=np.int32) == [0, 100, 255]
    assert scaled(-1.0, 0.0, 1.0) == [0, 128, 255]
    assert scaled(0, 10**6, dtype=np.int32) == [0, 255]
    assert scaled(0.0, np.nan, 1.0) == [0, 0, 255] and scaled(-3.0, -3.0) == [0, 0]
    assert scaled(0, 1, dtype=np.int32) == [0, 1], "a picture that is almost black stays so"


def test_exif_turns_a_picture_and_its_size():
    image = Image.new("RGB", (20, 10), RED)
    for orientation, size in ((6, (10, 20)), (3, (20, 10)), (1, (20, 10))):
        exif = image.getexif()
        exif[0x0112] = orientation
        content = encoded(image, "JPEG", exif=exif)
        assert rgb_picture(content).size == size == upright_size(opened(content))
        assert ("turned" in note_of(opened(content))) == (orientation != 1)


def test_of_an_animation_the_first_frame_is_taken():
    first, later = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    for kind in ("GIF", "PNG", "WEBP"):
        content = encoded(first, kind, save_all=True, append_images=[later])
        assert pixel(content)[0] > 240 and "the first frame" in note_of(opened(content))


def test_what_is_cut_off_or_no_picture_is_a_sentence():
    noise = Image.effect_noise((200, 200), 60).convert("RGB")
    halves = [encoded(noise, kind) for kind in ("PNG", "JPEG", "TIFF", "GIF")]
    for broken in (*(half[: len(half) // 2] for half in halves), halves[0][:3], b"", b"<html>"):
        with pytest.raises(PictureError) as error:
            rgb_picture(broken)
        assert str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def ceiling(monkeypatch):
    """PIL's setting is put back."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)


def test_pictures_larger_than_the_limit_are_refused_before_they_are_decoded(ceiling, monkeypatch):
    large = encoded(Image.new("1", (15000, 12000)))
    words = "180,000,000 pixels is larger than data.max_pixels, 178,956,970 .* raise data.max"
    with pytest.raises(PictureError, match=words):
        rgb_picture(large)
    raise_limit(150_000_000)
    assert limit() == 178_956_970, "it is never lowered"
    raise_limit(180_000_001)
    check_size(opened(large))
    assert limit() == 180_000_002, "PIL's own setting counts in halves"


@pytest.mark.parametrize("turn, sides", [(1, (1200, 800)), (6, (800, 1200))])
def test_of_a_huge_jpeg_no_more_is_decoded_than_is_used(ceiling, monkeypatch, turn, sides):
    image = Image.radial_gradient("L").resize((1200, 800)).convert("RGB")
    exif = image.getexif()
    exif[0x0112] = turn
    content = encoded(image, "JPEG", exif=exif)
    whole = rgb_picture(content, 50_000)
    assert whole.size == full_size(whole) == sides, "below the limit nothing changes"
    monkeypatch.setattr(pictures, "MOST_PIXELS", 900_000)
    part = rgb_picture(content, 50_000)
    assert part.size == tuple(side // 4 for side in sides) and full_size(part) == sides
    near = np.asarray(whole.resize(part.size), dtype=float) - np.asarray(part, dtype=float)
    assert np.abs(near).mean() < 3


def test_pictures_as_data_sets_hold_them(tmp_path):
    """{bytes, path} and arrays uint8 [H, W, C] are the picture itself; others would be guessed."""
    values = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    content = encoded(Image.fromarray(values))
    (tmp_path / "a.png").write_bytes(content)
    beside = {"bytes": None, "path": str(tmp_path / "a.png")}
    for form in (values, {"bytes": content, "path": "not there.png"}, beside):
        assert np.array_equal(np.asarray(rgb_picture(form)), values)
    assert rgb_picture(values[..., :1]).size == (7, 5)
    for wrong in (values.transpose(2, 0, 1), values / 255, values[None], values[..., :2]):
        with pytest.raises(PictureError, match=r"expected uint8 .height, width, 3."):
            rgb_picture(wrong)
