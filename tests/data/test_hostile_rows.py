"""Broken annotations are refused in a sentence, whatever they contain."""

import json

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import DATA, load_built_in

IMAGE = {"id": 1, "file_name": "0.png", "width": 32, "height": 32}
ANNOTATION = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 20, 20]}
BROKEN = {
    "no annotation": [None],
    "a list": [[None]],
    "a number as caption": [ANNOTATION | {"caption": 7}],
    "sentences of numbers": [ANNOTATION | {"sentences": [1, None, {"sent": 3}]}],
    "a bbox beyond floats": [ANNOTATION | {"bbox": [1, 2, 10**400, 3], "caption": "it"}],
    "no bbox": [{**ANNOTATION, "bbox": None, "caption": "it"}],
}


@pytest.mark.parametrize("case", sorted(BROKEN))
@pytest.mark.parametrize("kind", ["coco", "refcoco"])
def test_broken_annotations_are_refused_in_a_sentence(tmp_path, case, kind):
    load_built_in()
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png")
    content = {"images": [IMAGE], "categories": [], "annotations": BROKEN[case]}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        DATA.get("vision")(path=file, format=kind)
    assert "rows.json" in str(error.value)


def test_an_integer_that_no_float_holds_is_no_box(tmp_path):
    load_built_in()
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png")
    row = {"image": "0.png", "problem": "where?", "boxes": [[1, 2, 10**400, 3]]}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="rows.jsonl:1: box .* is not four numbers"):
        DATA.get("vision")(path=file)
