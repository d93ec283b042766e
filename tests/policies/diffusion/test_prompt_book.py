"""What a replayed pipeline remembers of prompts: bounded, its policy's own, and the same numbers
everywhere."""

import gc
from functools import partial

import pytest
from PIL import Image

from mmrl.policies.diffusion.prompt_book import PromptBook

FIELDS = {"prompt": "text", "image": "image"}
book = partial(PromptBook, ("image",))


def pictured(colour, side=8):
    return {"text": colour, "image": Image.new("RGB", (side, side), colour)}


def test_a_number_is_what_is_read_of_a_prompt(tmp_path):
    red, blue = pictured("red"), pictured("blue")
    file = tmp_path / "red.png"
    red["image"].save(file)
    one, two = book(), book()
    number = one.number(FIELDS, red)
    assert number == two.number(FIELDS, red | {"image": str(file), "other": 1})
    assert one.number(FIELDS, red | {"image": blue["image"]}) != number
    several = red | {"image": [red["image"], blue["image"]]}
    turned = red | {"image": [blue["image"], red["image"]]}
    assert len({number, one.number(FIELDS, several), one.number(FIELDS, turned)}) == 3
    shown = one.values(one.number(FIELDS, several))["image"]
    assert [picture.getpixel((0, 0)) for picture in shown] == [(255, 0, 0), (0, 0, 255)]


def test_pictures_are_closed_and_opened_again(tmp_path):
    """The paths stay; of the pictures as many bytes as the bound says."""
    small = book(opened=2 * 8 * 8 * 3)
    numbers = []
    for colour in ("red", "blue", "green"):
        pictured(colour)["image"].save(tmp_path / f"{colour}.png")
        prompt = {"text": colour, "image": str(tmp_path / f"{colour}.png")}
        numbers.append(small.number(FIELDS, prompt))
    assert small.opened.currsize == 2 * 8 * 8 * 3
    assert small.values(numbers[0])["image"].getpixel((0, 0)) == (255, 0, 0)
    large = small.number(FIELDS, pictured("red", side=64))  # more than the bound by itself
    assert small.values(large)["image"].size == (64, 64)
    assert small.opened.currsize <= small.opened.maxsize


def test_a_book_is_bounded_and_goes_with_its_policy():
    PromptBook.living.clear()
    old = book(limit=2)
    numbers = [old.number({"prompt": "text"}, {"text": text}) for text in "abc"]
    assert len(old.prompts) == 2 and old.names(numbers[0]) == ()
    with pytest.raises(KeyError):
        old.values(numbers[0])
    teacher = book()
    assert teacher.values(numbers[2]) == {"prompt": "c"}  # its student's
    later = book()
    del old, teacher
    gc.collect()
    assert later.names(numbers[2]) == () and list(PromptBook.living) == [later]
