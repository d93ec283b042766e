"""Registers the benchmarks of vision-language models: RefCOCO, Geometry3K, CLEVR, SuperCLEVR,
ScreenSpot, ChartQA and DocVQA."""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmrl.apps.benchmarks import rules
from mmrl.apps.benchmarks.items import ALL, BENCHMARKS, Benchmark, Item, Sample, Score, need_path
from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from mmrl.data.sources.reader import rows_of
from mmrl.data.vision import formats

Row = Mapping[str, Any]
Coords = Literal["original", "rel1000", "rel1", "resized"]
TEXT = ("text", "question", "problem", "query", "instruction", "prompt")
PICTURE = (
    "image",
    "images",
    "image_filename",
    "imgname",
    "img_filename",
    "image_path",
    "img",
    "file_name",
)
RIGHT = ("answer", "label", "ground_truth", "solution")
SPLITS = (".json", ".jsonl", ".parquet")


class Questions(Benchmark):
    """Reads rows of an official file, and scores each answer by its rule.

    ``folders``: where pictures are, relative to the file, besides its own folder.
    """

    measure = "accuracy"
    what: ClassVar[str] = "the official file"
    name: ClassVar[str] = ""
    folders: ClassVar[tuple[str, ...]] = ("images",)
    # the instruction of a question; {text} is the question
    question: ClassVar[str] = "{text}"

    def __init__(self, path: Path | None = None, images: Path | None = None):
        self.path = need_path(path, self.name, self.what)
        self.images = None if images is None else Path(images)
        self.items = self.read()

    def read(self) -> list[Item]:
        items: list[Item] = []
        for place, row, category in self.rows():
            if isinstance(row, ValueError):
                raise UserError(f"{place}: {row}") from row
            try:
                for prompt in self.prompts(row):
                    text = self.question.replace("{text}", str(prompt["text"]).strip())
                    shown = {**prompt, "text": text, "origin": place}
                    items.append(
                        Item(len(items), category or self.category(row), shown, self.key(row))
                    )
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise UserError(f"{place}: not a row of {self.what}: {why}") from error
        if not items:
            raise UserError(f"{self.path}: no questions there; expected {self.what}")
        return items

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield index, row and category (empty: the row's) of every question."""
        for file in self.files():
            for place, row in rows_of(file):
                yield place, row, ""

    def files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        files = sorted(f for f in self.path.iterdir() if f.suffix in SPLITS)
        if not files:
            raise UserError(f"{self.path}: no .json, .jsonl or .parquet file; expected {self.what}")
        return files

    @abstractmethod
    def prompts(self, row: Row) -> Iterator[Prompt]:
        """Yield the questions of a row: text, images and what the rule needs."""

    @abstractmethod
    def rule(self, sample: Sample) -> float:
        """Score an answer, 0 to 1."""

    def category(self, row: Row) -> str:
        return str(row.get("split", row.get("category", ALL)))

    def key(self, row: Row) -> str:
        return str(first(row, ("question_id", "questionId", "id", "index"), ""))

    def picture(self, row: Row) -> dict[str, Any]:
        """Return the pictures of a row under "images": existing files, or bytes of a parquet file.
        A missing picture is an error only when a model is sampled."""
        value = first(row, PICTURE, None)
        several = value if isinstance(value, list) else [] if value is None else [value]
        return {"images": [self.medium(source) for source in several]} if several else {}

    def medium(self, source: Any) -> Any:
        if isinstance(source, Mapping):
            if source.get("bytes") is None:
                return self.medium(source["path"])
            from PIL import Image

            return Image.open(io.BytesIO(source["bytes"]))
        base = self.path if self.path.is_dir() else self.path.parent
        roots = [base, *(base / f for f in self.folders), *(base.parent / f for f in self.folders)]
        places = [self.images] if self.images is not None else roots
        spots = [place / str(source) for place in places]
        return str(next((spot for spot in spots if spot.is_file()), spots[0]))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [Score(self.rule(sample), self.parts(sample)) for sample in samples]

    def parts(self, sample: Sample) -> tuple[tuple[str, float], ...]:
        return ()


def first(row: Row, names: Sequence[str], default: Any) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), default)


def needed(row: Row, names: Sequence[str]) -> Any:
    """Return the first of these fields that a row has, or raise ValueError."""
    value = first(row, names, None)
    if value is None:
        raise ValueError(f"none of {', '.join(names)}; it has {', '.join(map(str, row))}")
    return value


class Places(Questions):
    """Scores boxes and points; ``coords``: default space of answers."""

    spatial: ClassVar[tuple[str, dict[str, Any]]]

    def __init__(
        self, path: Path | None = None, images: Path | None = None, coords: Coords = "original"
    ):
        self.coords = coords
        super().__init__(path, images)
        name, options = self.spatial
        self.reward = REWARDS.build(name, **options)

    def rule(self, sample: Sample) -> float:
        view = sample.row.get("view")
        prompt = dict(sample.item.prompt)
        if isinstance(view, Mapping):
            prompt["view"] = view
        elif self.coords != "original":
            prompt["view"] = {"coords": self.coords, "sizes": [self.size(prompt)]}
        return float(self.reward([sample.text], [prompt])[0])

    def size(self, prompt: Prompt) -> tuple[int, int]:
        if "width" in prompt and "height" in prompt:
            return int(prompt["width"]), int(prompt["height"])
        source = (prompt.get("images") or [""])[0]
        if not isinstance(source, (str, Path)):
            return int(source.size[0]), int(source.size[1])
        from PIL import Image

        try:
            with Image.open(source) as picture:
                return picture.size
        except OSError as error:
            raise UserError(
                f"{source}: needed for the size of the picture, since benchmark.coords="
                f"{self.coords}; name its folder by benchmark.images=FOLDER"
            ) from error


def box_of(row: Row) -> list[float]:
    """Return the right box as [x0, y0, x1, y1]: ``bbox`` is COCO's [x, y, width, height]; ``boxes``
    and a ``solution`` of four numbers are corners."""
    if row.get("bbox") is not None:
        return formats.corners(row["bbox"])
    corners = needed(row, ("solution", "boxes", "box"))
    corners = corners[0] if isinstance(corners[0], (list, tuple)) else corners
    if len(corners) != 4:
        raise ValueError(f"box {corners!r} is not four numbers")
    return [float(v) for v in corners]


def sized(row: Row) -> dict[str, Any]:
    return {key: row[key] for key in ("width", "height") if row.get(key) is not None}


@BENCHMARKS.register("refcoco")
class RefCOCO(Places):
    """Count boxes of IoU 0.5 or more with the right one, for RefCOCO, RefCOCO+ and RefCOCOg.

    path: a COCO file with captions (MDETR's finetune_refcoco_val.json), rows with ``bbox`` and the
    expression, or VLM-R1's rows with ``normal_caption`` and ``solution``; a folder of such files
    counts each as a category. images: folder of COCO's pictures. coords: default space of answers.
    """

    name = "refcoco"
    what = "RefCOCO's annotations"
    source = "arXiv:1608.00272"
    measure = "IoU of 0.5 or more"
    folders = ("images", "train2014", "coco/train2014")
    spatial = ("referring", {"threshold": 0.5})
    question = "{text}"

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        for file in self.files():
            category = file.stem if self.path.is_dir() else ""
            for place, row in rows_of(file):
                if isinstance(row, Mapping) and "annotations" in row:
                    for part, make in formats.refcoco(row, None):
                        yield f"{place}: {part}", make(), category
                else:
                    yield place, row, category

    def prompts(self, row: Row) -> Iterator[Prompt]:
        if "text" in row and "boxes" in row:  # of a COCO file, already built
            yield {**row, **self.picture(row)}
            return
        names = (*formats.EXPRESSIONS, "normal_caption", "answer", "problem")
        several = needed(row, names)
        sentences = [several] if isinstance(several, str) else several
        shared = {"boxes": [box_of(row)], **self.picture(row), **sized(row)}
        for sentence in sentences:
            text = sentence if isinstance(sentence, str) else sentence["sent"]
            yield {"text": formats.REFER.format(expression=text), **shared}


@BENCHMARKS.register("screenspot")
class ScreenSpot(Places):
    """Count points inside the box of the target element, by platform and kind of element.

    Rows of ScreenSpot-v2 and -Pro have the same fields.

    path: a folder of screenspot_*.json, or one of them. images: their folder of screenshots.
    coords: default space of answers. boxes: those of -Pro are corners.
    """

    name = "screenspot"
    what = "ScreenSpot's rows: instruction, bbox, img_filename, data_type"
    source = "arXiv:2401.10935"
    measure = "point in the box"
    folders = ("images", "screenspot_imgs", "screenspotv2_image")
    spatial = ("point", {"form": "inside"})
    question = "Give the point to click for: {text}"

    def __init__(
        self,
        path: Path | None = None,
        images: Path | None = None,
        coords: Coords = "original",
        boxes: Literal["size", "corners"] = "size",
    ):
        self.corners = boxes == "corners"
        super().__init__(path, images, coords)

    def prompts(self, row: Row) -> Iterator[Prompt]:
        bbox = needed(row, ("bbox", "box"))
        box = [float(v) for v in bbox] if self.corners else formats.corners(bbox)
        text = str(needed(row, ("instruction", "text", "question")))
        yield {"text": text, "boxes": [box], **self.picture(row), **self.sizes(row)}

    def sizes(self, row: Row) -> dict[str, Any]:
        pair = row.get("img_size")
        return {"width": pair[0], "height": pair[1]} if pair else sized(row)

    def category(self, row: Row) -> str:
        platform = str(row.get("platform", row.get("data_source", "")))
        kinds = {"ios": "mobile", "android": "mobile", "windows": "desktop", "macos": "desktop"}
        kind = str(row.get("data_type", row.get("ui_type", "")))
        place = kinds.get(platform, platform)
        if place in ("shop", "forum", "tool", "gitlab"):
            place = "web"
        return " ".join(part for part in (place, kind) if part) or ALL


@BENCHMARKS.register("geometry3k")
class Geometry3K(Questions):
    """Count answers that are mathematically equal to the right one (Lu et al. 2021, Inter-GPS).

    path: rows of ``problem``, ``answer`` and ``images`` (the data set hiyouga/geometry3k, .parquet
    or .jsonl), or Inter-GPS's folder of numbered folders with data.json, where the letter of the
    choice or its value is right.
    """

    name = "geometry3k"
    what = "Geometry3K: rows of problem and answer, or numbered folders with data.json"
    source = "arXiv:2105.04165"
    folders = ("images",)
    question = "{text}\nPut the final answer into \\boxed{}."

    def __init__(self, path: Path | None = None, images: Path | None = None):
        super().__init__(path, images)
        self.maths = REWARDS.build("maths")

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        folders = sorted(self.path.glob("*/data.json"), key=lambda f: f.parent.name.zfill(9))
        for file in folders:
            for place, row in rows_of(file):
                image = str(file.parent / "img_diagram.png")
                named = {**row, "image": image, "id": file.parent.name}
                yield place, named, ""
        if not folders:
            yield from super().rows()

    def prompts(self, row: Row) -> Iterator[Prompt]:
        text = str(needed(row, ("compact_text", "annot_text", "problem_text", *TEXT)))
        text = text.replace("<image>", "").strip()
        right = str(needed(row, RIGHT))
        prompt = {"text": text, "answer": right, **self.picture(row)}
        if options := row.get("choices"):
            letters = [chr(ord("A") + i) for i in range(len(options))]
            listed = "\n".join(f"{a}. {b}" for a, b in zip(letters, options, strict=True))
            value = str(options[letters.index(right)]) if right in letters else right
            letter = right if right in letters else ""
            prompt |= {"text": f"{text}\n{listed}", "answer": value, "letter": letter}
        yield prompt

    def rule(self, sample: Sample) -> float:
        letter = sample.item.prompt.get("letter")
        if letter and rules.choice(rules.written(sample.text), letter):
            return 1.0
        return float(self.maths([sample.text], [sample.item.prompt])[0])


@BENCHMARKS.register("clevr")
class CLEVR(Questions):
    """Count right answers by kind of question (Johnson et al. 2017).

    path: CLEVR_val_questions.json, or rows of ``problem`` and ``solution`` as R1-V trains on
    (clevr_cogen_a_train). images: the folder of the split's pictures.
    """

    name = "clevr"
    what = "CLEVR's questions"
    source = "arXiv:1612.06890"
    folders = ("images", "images/val", "images/test", "images/valA", "images/valB")
    question = "{text}\nAnswer with a number or a word."

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        for file in self.files():
            for place, row in rows_of(file):
                if isinstance(row, Mapping) and "questions" in row:
                    for number, question in enumerate(row["questions"]):
                        yield f"{place}: question {number}", question, ""
                else:
                    yield place, row, ""

    def prompts(self, row: Row) -> Iterator[Prompt]:
        right = rules.written(str(needed(row, RIGHT)))
        yield {"text": str(needed(row, TEXT)), "answer": right, **self.picture(row)}

    def category(self, row: Row) -> str:
        """Return the kind of question: the last function of its program, as in CLEVR's tables."""
        program = row.get("program")
        if not program:
            return super().category(row)
        last = str(program[-1].get("function", program[-1].get("type", "")))
        if last in ("equal_integer", "less_than", "greater_than"):
            return "compare numbers"
        kind = last.partition("_")[0]
        return {"query": "query attribute", "equal": "compare attribute"}.get(kind, kind or ALL)

    def key(self, row: Row) -> str:
        return str(first(row, ("question_index", "question_id", "id"), ""))

    def rule(self, sample: Sample) -> float:
        answer = rules.written(sample.text)
        return float(rules.same_answer(answer, sample.item.prompt["answer"]))


@BENCHMARKS.register("superclevr")
class SuperCLEVR(CLEVR):
    """Count right counts on pictures of vehicles, out of distribution for CLEVR.

    R1-V is tested on 200 of them.

    path: rows of ``question``, ``ground_truth`` and ``image_path``
    (superclevr_test200_counting_problems.jsonl), or Super-CLEVR's own questions.
    """

    name = "superclevr"
    what = "Super-CLEVR's questions"
    source = "arXiv:2212.00259"


@BENCHMARKS.register("chartqa")
class ChartQA(Questions):
    """Score charts by relaxed accuracy: numbers within 5 %, others equal (Masry et al. 2022).

    path: ChartQA's folder test with test_human.json and test_augmented.json, or one such file.
    images: the folder of the charts; by default png next to the files.
    """

    name = "chartqa"
    what = "ChartQA's rows: imgname, query, label"
    source = "arXiv:2203.10244"
    measure = "relaxed accuracy"
    folders = ("png", "images")
    question = "{text}\nAnswer with a number or a few words."

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        for file in self.files():
            part = file.stem.removeprefix("test_").removeprefix("val_")
            for place, row in rows_of(file):
                yield place, row, part if part in ("human", "augmented") else ""

    def prompts(self, row: Row) -> Iterator[Prompt]:
        right = needed(row, RIGHT)
        right = right[0] if isinstance(right, list) and len(right) == 1 else right
        yield {"text": str(needed(row, TEXT)), "answer": str(right), **self.picture(row)}

    def category(self, row: Row) -> str:
        kind = row.get("human_or_machine", row.get("type"))
        names = {0: "human", 1: "augmented", "human_test": "human", "augmented_test": "augmented"}
        return names.get(kind, super().category(row)) if kind is not None else super().category(row)

    def rule(self, sample: Sample) -> float:
        answer = rules.written(sample.text)
        return float(rules.relaxed(answer, sample.item.prompt["answer"]))


@BENCHMARKS.register("docvqa")
class DocVQA(Questions):
    """Score answers about documents by ANLS with threshold 0.5, the best of several right answers.

    InfographicVQA has the same form.

    path: val_v1.0_withQT.json, or rows of ``question``, ``answers`` and ``image``. images: the
    folder that image names are relative to.
    """

    name = "docvqa"
    what = "DocVQA's questions: question, answers, image"
    source = "arXiv:2007.00398"
    measure = "ANLS"
    folders = ("images", "documents", "spdocvqa_images")
    question = "{text}\nAnswer with words of the document."

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        for file in self.files():
            for place, row in rows_of(file):
                if isinstance(row, Mapping) and isinstance(row.get("data"), list):
                    for number, question in enumerate(row["data"]):
                        yield f"{place}: question {number}", question, ALL
                else:
                    yield place, row, ALL

    def prompts(self, row: Row) -> Iterator[Prompt]:
        answers = needed(row, ("answers", "answer"))
        several = [answers] if isinstance(answers, str) else [str(text) for text in answers]
        kinds = row.get("question_types") or []
        yield {
            "text": str(needed(row, TEXT)),
            "answer": several[0],
            "answers": several,
            "kinds": list(kinds),
            **self.picture(row),
        }

    def rule(self, sample: Sample) -> float:
        return rules.anls(rules.written(sample.text), sample.item.prompt["answers"])

    def parts(self, sample: Sample) -> tuple[tuple[str, float], ...]:
        value = self.rule(sample)
        return tuple((kind, value) for kind in sample.item.prompt["kinds"])
