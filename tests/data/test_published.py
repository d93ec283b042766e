"""Pairs and captions as data sets and trainers write them, and buckets of proportions."""

import json
from collections import Counter

import pytest
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.data.by_size import BySize
from mmrl.data.captions import Captions
from mmrl.data.ledger import collecting
from mmrl.data.published import pairs_in


def sides(pairs):
    return [(pair["text"], pair["chosen"], pair["rejected"]) for pair in pairs]


ONE = [("p", "a", "b")]
TWO = [("p", "b", "a")]
PICK = {"caption": "p", "jpg_0": "a", "jpg_1": "b", "has_label": True}
RAPIDATA = {"prompt": "p", "image1": "a", "image2": "b"}
RANKED = {"prompt": "p", "image_path": ["a", "b", "c"], "rank": [2, 1, 2]}
WEIGHTED = RAPIDATA | {
    "weighted_results_image1_preference": 0.8,
    "weighted_results_image2_preference": 0.2,
    "weighted_results_image1_alignment": 0.1,
    "weighted_results_image2_alignment": 0.9,
}


@pytest.mark.parametrize(
    ("row", "expected", "undecided"),
    [
        (PICK | {"label_0": 1.0, "label_1": 0.0}, ONE, 0),
        (PICK | {"label_0": 0.0, "label_1": 1.0}, TWO, 0),
        (PICK | {"label_0": 0.5, "label_1": 0.5}, [], 1),
        (PICK | {"label_0": 1.0, "has_label": False}, [], 1),
        ({"prompt": "p", "image_path": ["a", "b"], "human_preference": [0, 1]}, TWO, 0),
        ({"prompt": "p", "file_path": ["a", "b"], "human_preference": [1, 0]}, ONE, 0),
        # a test split of HPD v2: ranks of several, two of them equal
        (RANKED, [("p", "b", "a"), ("p", "b", "c")], 1),
        ({"prompt": "p", "path1": "a", "path2": "b", "choice_dist": [9, 1]}, ONE, 0),
        ({"prompt": "p", "generations": ["a", "b"], "ranking": [2, 1]}, TWO, 0),
        ({"prompt": "p", "img_better": "a", "img_worse": "b"}, ONE, 0),
        (RAPIDATA | {"votes_image1": 3, "votes_image2": 20}, TWO, 0),
        (WEIGHTED, ONE, 0),
    ],
)
def test_rows_of_published_data_are_pairs(row, expected, undecided):
    left_out = Counter()
    assert sides(pairs_in(row, left_out)) == expected and left_out.total() == undecided


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "path1": "a", "path2": "b", "choice_dist": [1, 9]}, "choice_dist is"),
        (RAPIDATA | {"weighted_results_image1_alignment": 0.1}, "name the better one by columns"),
        ({"prompt": "p", "generations": ["a", "b"], "ranking": [1]}, "2 pictures, and there are 1"),
    ],
)
def test_rows_that_do_not_say_which_is_better_are_broken(row, words):
    with pytest.raises(ValueError, match=words):
        pairs_in(row, Counter())


def test_captions_in_a_list_are_rows_of_one_side(tmp_path):
    names = [f"{i}.png" for i in range(12)]
    for name in names:
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    table = tmp_path / "rows.jsonl"
    rows = [{"file_name": name, "text": [f"{name} once", f"{name} again"]} for name in names]
    table.write_text("\n".join(map(json.dumps, rows)))
    with collecting() as summaries:
        source = Captions(table, held_out=0.4)
    of_train, of_rest = ({p["answer"] for p in part} for part in (source.train, source.held_out))
    assert of_train and of_rest and not of_train & of_rest
    assert len(source.train) == 2 * len(of_train) and len(source.held_out) == 2 * len(of_rest)
    assert "12 pictures: have several captions" in " ".join(summaries[0].lines())


def test_kohyas_file_is_read_and_its_repeats_are_mentioned(tmp_path):
    folder = tmp_path / "10_girl"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(folder / "x.png")
    meta = folder / "meta_cap.json"
    meta.write_text(json.dumps({"x": {"caption": "a girl", "tags": "1girl, red"}}))
    with collecting() as summaries:
        (prompt,) = Captions(meta, held_out=0).train
    assert prompt["text"] == "a girl, 1girl, red" and prompt["answer"].endswith("10_girl/x.png")
    said = " ".join(summaries[0].lines())
    assert "1 pictures: lie in folders that repeat them in kohya's trainer (10 times" in said


def test_pictures_go_to_the_bucket_of_their_proportions(tmp_path):
    shapes = {"wide": (80, 20), "tall": (16, 60), "square": (40, 44)}
    for name, shape in shapes.items():
        Image.new("RGB", shape).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(name)
    buckets = [(32, 32), (16, 64), (64, 16)]
    prompts = Captions(tmp_path, held_out=0, buckets=buckets).train
    sizes = {prompt["text"]: prompt["size"] for prompt in prompts}
    assert sizes == {"wide": [16, 64], "tall": [64, 16], "square": [32, 32]}
    with pytest.raises(UserError, match="leave scan true"):
        Captions(tmp_path, buckets=buckets, scan=False)


def test_iterations_have_one_size_and_an_epoch_has_all():
    rows = [{"text": str(i), "size": i % 3} for i in range(20)]  # 7, 7 and 6 rows
    drawn = BySize(rows, lambda prompt: prompt["size"])
    batches = [drawn.batch(3, iteration, seed=1) for iteration in range(3 * 8)]
    assert all(len({row["size"] for row in batch}) == 1 for batch in batches)
    for epoch in range(3):  # of 3, 3 and 2 iterations
        texts = {row["text"] for batch in batches[8 * epoch : 8 * epoch + 8] for row in batch}
        assert len(texts) == 20
    again = [BySize(rows, lambda prompt: prompt["size"]).batch(3, i, seed=1) for i in (5, 4)]
    assert again == [batches[5], batches[4]]
    assert {drawn.pick(u / 10, 0)["size"] for u in range(10)} == {batches[-1][0]["size"]}
