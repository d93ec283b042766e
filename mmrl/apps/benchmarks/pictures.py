"""Registers image benchmarks: GenEval, OCR, DPG-Bench, HPSv2 and PickScore."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor

from mmrl.apps.benchmarks import rules
from mmrl.apps.benchmarks.items import ALL, BENCHMARKS, Benchmark, Item, Sample, Score, need_path
from mmrl.apps.benchmarks.prompts import geneval_suite
from mmrl.core.errors import UserError
from mmrl.core.media.pictures import PictureError
from mmrl.core.registry import REWARDS
from mmrl.core.types import Prompt
from mmrl.data.prompts import read
from mmrl.data.sources.reader import rows_of
from rewards.base.prompt import from_pil
from rewards.images.geneval import Detection, detections_by_name, published

STRICTNESS = {"counting": 0.9}  # threshold of a detection, by task; of others 0.3
Judge = Callable[[Tensor, list[Prompt]], Tensor]


def pixels(file: Path) -> Tensor:
    """Read a picture as [3, H, W] in 0..1."""
    try:
        return from_pil(file)
    except PictureError as error:
        raise UserError(f"{file}: {error}") from error


def batches(samples: Sequence[Sample], size: int) -> Iterator[tuple[Tensor, list[Sample]]]:
    """Yield neighbours of one size as [N, 3, H, W] with their samples, N at most ``size``."""
    stack: list[Tensor] = []
    group: list[Sample] = []
    for sample in samples:
        assert sample.file is not None
        picture = pixels(sample.file)
        if group and (len(group) == size or picture.shape != stack[0].shape):
            yield torch.stack(stack), group
            stack, group = [], []
        stack.append(picture)
        group.append(sample)
    if group:
        yield torch.stack(stack), group


def scored(samples: Sequence[Sample], judge: Judge, size: int = 8) -> list[Score]:
    """Score pictures by a reward."""
    values = [
        value
        for stack, group in batches(samples, size)
        for value in judge(stack, [sample.item.prompt for sample in group]).tolist()
    ]
    return [Score(float(value)) for value in values]


def reward(name: str, **options: Any) -> Any:
    return REWARDS.build(name, **{key: v for key, v in options.items() if v is not None})


@BENCHMARKS.register("geneval")
class GenEvalBenchmark(Benchmark):
    """Count the pictures with the requested objects, count, colour and position (GenEval).

    path: evaluation_metadata.jsonl; without it the metadata next to the samples, or, for a model,
    generated prompts of the same form. detections: a .jsonl of a detector's output, instead of
    running one: rows of ``image`` and ``detections`` ({class, score, box, color}), or the results
    file of the official evaluation. detector: Mask2Former or another object detector of
    transformers, OWL-ViT among them; hub id or folder. clip: for colours. prompts_seed: of
    generated prompts.
    """

    kind = "picture"
    headline = "categories"
    source = "arXiv:2310.11513"
    num_samples = 4

    def __init__(
        self,
        path: Path | None = None,
        detections: Path | None = None,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "ViT-L-14/openai",
        prompts_seed: int = 43,
    ):
        self.detector = detector
        self.clip = clip
        self.detections = None if detections is None else recorded(Path(detections))
        if path is not None:
            path = need_path(path, "geneval", "GenEval's evaluation_metadata.jsonl")
        prompts = geneval_suite(prompts_seed) if path is None else read(path)
        self.generated = path is None
        self.items = [
            Item(i, str(checked(prompt, path).get("tag", ALL)), prompt)
            for i, prompt in enumerate(prompts)
        ]

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        if self.detections is not None:
            return [self.by_record(sample) for sample in samples]
        judge = reward("geneval", detector=self.detector, clip=self.clip, form="published")
        return scored(samples, judge)

    def by_record(self, sample: Sample) -> Score:
        """Apply the rule to recorded detections in the picture."""
        assert self.detections is not None and sample.file is not None
        file = sample.file
        names = (str(file), "/".join(file.parts[-3:]), file.name)
        record = next((self.detections[name] for name in names if name in self.detections), None)
        if record is None:
            raise UserError(
                f"benchmark.detections has no row for {names[1]}; a row names its picture by "
                f'"image", such as 00000/samples/0000.png'
            )
        prompt = sample.item.prompt
        if any("color" in entry for entry in prompt["include"]) and not record["coloured"]:
            if record["correct"] is None:
                raise UserError(
                    f"benchmark.detections: {names[1]} needs colours, and its detections have no "
                    f'"color"; add them, or leave the option out so that CLIP names them'
                )
            return Score(float(record["correct"]))  # of the official evaluation, which saw them
        threshold = STRICTNESS.get(str(prompt.get("tag")), 0.3)
        by_name = detections_by_name(record["objects"], threshold, 16)
        hues = {id(entry): hue for entry, hue in record["hues"]}
        verdict = published(by_name, prompt, lambda some, _: [hues[id(x)] or "" for x in some])
        return Score(float(verdict))


def checked(prompt: Prompt, path: Path | None) -> Prompt:
    """Return a line of GenEval's metadata, or raise UserError."""
    entries = prompt.get("include")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and {"class", "count"} <= set(entry) for entry in entries
    ):
        raise UserError(
            f'{path}: the prompt {prompt["text"]!r} has no "include" of GenEval\'s form, a list of '
            f'{{"class": ..., "count": ...}}; give evaluation_metadata.jsonl'
        )
    return prompt


def recorded(file: Path) -> dict[str, dict[str, Any]]:
    """Read detections by picture: mmrl's rows, or those of GenEval's evaluate_images.py, whose
    ``details`` are boxes [x0, y0, x1, y1, score] by class."""
    records: dict[str, dict[str, Any]] = {}
    for place, row in rows_of(need_path(file, "geneval", "a .jsonl of detections")):
        name = row.get("image", row.get("filename")) if isinstance(row, Mapping) else None
        if not isinstance(name, str):
            raise UserError(f'{place}: no "image"; a row is {{"image": ..., "detections": [...]}}')
        try:
            pairs = list(objects(row))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f'{place}: a detection is {{"class": ..., "score": ..., "box": [x0, y0, x1, y1]}}, '
                f"with a color where colours are asked for ({error!r})"
            ) from error
        pairs.sort(key=lambda pair: -pair[0].score)
        verdict = row.get("correct")
        record = {
            "objects": [entry for entry, _ in pairs],
            "hues": pairs,
            "coloured": "detections" in row and all(hue is not None for _, hue in pairs),
            "correct": verdict if isinstance(verdict, bool) else None,
        }
        records |= {name: record, "/".join(Path(name).parts[-3:]): record}
    return records


def objects(row: Mapping[str, Any]) -> Iterator[tuple[Detection, str | None]]:
    if "detections" in row:
        for entry in row["detections"]:
            box = torch.tensor([float(v) for v in entry["box"]])
            if box.shape != (4,):
                raise ValueError(f"box {entry['box']}")
            yield Detection(entry["class"], float(entry["score"]), box), entry.get("color")
        return
    details = row["details"]
    for name, boxes in (json.loads(details) if isinstance(details, str) else details).items():
        for *box, score in boxes:
            yield Detection(name, float(score), torch.tensor([float(v) for v in box])), None


@BENCHMARKS.register("ocr")
class OCRBenchmark(Benchmark):
    """Score whether the text in double quotes is in the picture: 1 - edit distance / length.

    path: test.txt, a prompt per line. side: as in the reward ``ocr``.
    """

    kind = "picture"
    measure = "1 - edit distance / length"
    source = "arXiv:2505.05470"

    def __init__(self, path: Path | None = None, side: Annotated[int, Ge(32)] = 736):
        path = need_path(path, "ocr", "the task's test.txt, a prompt a line")
        self.items = [Item(i, ALL, prompt) for i, prompt in enumerate(read(path))]
        self.side = side

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        return scored(samples, reward("ocr", side=self.side))


@BENCHMARKS.register("dpg")
class DPG(Benchmark):
    """Ask a model DPG-Bench's yes-or-no questions about every picture (Hu et al. 2024, ELLA).

    path: dpg_bench.csv. answers: a .jsonl of a model's answers, instead of running one: rows of
    ``image`` and ``answers`` {question number: yes or no}. model: an image-text-to-text model of
    transformers; the published figures are of mPLUG-large. tiles: pictures per file, arranged in
    two rows (published: 4); 1 for single pictures.

    The score of a picture is the share of questions answered yes, where a question counts only if
    those that it depends on were answered yes; categories count every answer independently.
    """

    kind = "picture"
    measure = "share of questions"
    source = "arXiv:2403.05135"
    num_samples = 4

    def __init__(
        self,
        path: Path | None = None,
        answers: Path | None = None,
        model: str = "Qwen/Qwen2.5-VL-3B-Instruct",
        tiles: Annotated[int, Ge(1)] = 1,
    ):
        path = need_path(path, "dpg", "DPG-Bench's dpg_bench.csv")
        self.items = dpg_items(path)
        self.model = model
        self.tiles = tiles
        self.answers = None if answers is None else said_yes(Path(answers))

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        if self.answers is not None:
            return [self.judged(sample, self.recorded(sample)) for sample in samples]
        judge = reward(
            "vqa_score",
            model=self.model,
            question="{text} Please answer yes or no.",
            normalize=True,
        )
        return [self.mean(sample, self.asked(sample, judge)) for sample in samples]

    def recorded(self, sample: Sample) -> dict[int, bool]:
        assert self.answers is not None and sample.file is not None
        names = ("/".join(sample.file.parts[-3:]), sample.file.name, sample.file.stem)
        replies = next((self.answers[name] for name in names if name in self.answers), None)
        if replies is None:
            raise UserError(f"benchmark.answers has no row for the picture {sample.file.name}")
        missing = set(sample.item.prompt["questions"]) - set(replies)
        if missing:
            raise UserError(
                f"benchmark.answers: {sample.file.name} has no answer to question {min(missing)}"
            )
        return replies

    def asked(self, sample: Sample, judge: Judge) -> list[dict[int, bool]]:
        """Ask all questions about every picture of the file."""
        assert sample.file is not None
        questions = sample.item.prompt["questions"]
        replies = []
        for picture in cut_up(pixels(sample.file), self.tiles):
            stack = picture.expand(len(questions), -1, -1, -1)
            chances = judge(stack, [{"text": text} for text in questions.values()])
            yes = (chances > 0.5).tolist()
            replies.append(dict(zip(questions, yes, strict=True)))
        return replies

    def mean(self, sample: Sample, replies: Sequence[dict[int, bool]]) -> Score:
        judged = [self.judged(sample, answers) for answers in replies]
        value = math.fsum(score.value for score in judged) / len(judged)
        return Score(value, tuple(part for score in judged for part in score.parts))

    def judged(self, sample: Sample, replies: dict[int, bool]) -> Score:
        prompt = sample.item.prompt
        verdicts = {question: replies[question] for question in prompt["questions"]}
        scores = rules.with_dependencies(verdicts, prompt["parents"])
        parts = tuple(
            (prompt["kinds"][q].split("-")[0].strip(), float(y)) for q, y in verdicts.items()
        )
        return Score(math.fsum(scores.values()) / len(scores), parts)


def cut_up(picture: Tensor, tiles: int) -> list[Tensor]:
    """Split [3, H, W] into ``tiles`` pictures, two per row."""
    if tiles == 1:
        return [picture]
    rows = -(-tiles // 2)
    height, width = picture.shape[1] // rows, picture.shape[2] // 2
    cut = [
        picture[:, height * (i // 2) : height * (i // 2 + 1), width * (i % 2) : width * (i % 2 + 1)]
        for i in range(tiles)
    ]
    return cut


def dpg_items(path: Path) -> list[Item]:
    """Read the questions of every prompt, in the order of the file."""
    import csv

    grouped: dict[str, Prompt] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                question = int(line["proposition_id"])
                needed = [int(float(part)) for part in line["dependency"].split(",")]
                kind = line["tuple"].split("(")[0].strip()
                text = line["question_natural_language"]
                name = line["item_id"]
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path}:{number}: not a row of dpg_bench.csv, which has item_id, text, "
                    f"proposition_id, dependency, tuple, question_natural_language ({error!r})"
                ) from error
            empty: Prompt = {
                "text": line.get("text") or "",
                "questions": {},
                "parents": {},
                "kinds": {},
            }
            prompt = grouped.setdefault(name, empty)
            prompt["text"] = prompt["text"] or line.get("text") or ""
            prompt["questions"][question] = text
            prompt["parents"][question] = needed
            prompt["kinds"][question] = kind
    if not grouped:
        raise UserError(f"{path}: no questions there; expected DPG-Bench's dpg_bench.csv")
    return [Item(i, ALL, prompt, name) for i, (name, prompt) in enumerate(grouped.items())]


def said_yes(file: Path) -> dict[str, dict[int, bool]]:
    """Read a model's yes and no by picture."""
    replies = {}
    for place, row in rows_of(need_path(file, "dpg", "a .jsonl of answers")):
        try:
            replies[str(row["image"])] = {
                int(question): yes if isinstance(yes, bool) else str(yes).strip().lower() == "yes"
                for question, yes in row["answers"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f'{place}: expected {{"image": ..., "answers": {{"1": "yes", ...}}}} ({error!r})'
            ) from error
    return replies


class Preference(Benchmark):
    """Averages a preference score over the pictures of a prompt list."""

    kind = "picture"
    judge = ""
    scale: float | str

    def __init__(self, path: Path | None, model: str | None):
        path = need_path(path, self.judge, "a file of prompts, or a folder of style.json files")
        self.items = styles(path)
        self.model = model

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        options = {"processor": self.model} if self.judge == "pickscore" else {}
        judge = reward(self.judge, model=self.model, scale=self.scale, **options)
        return scored(samples, judge)


@BENCHMARKS.register("hpsv2")
class HPSv2Benchmark(Preference):
    """Average HPSv2.1 over the prompts of HPDv2's test set, by style (Wu et al. 2023).

    path: a folder of anime.json, concept-art.json, paintings.json and photo.json, each a list of
    prompts, or a file of prompts. model: as in the reward ``hpsv2``.
    """

    headline = "categories"
    measure = "HPSv2.1"
    source = "arXiv:2306.09341"
    judge = "hpsv2"
    scale = "cosine"

    def __init__(self, path: Path | None = None, model: str | None = None):
        super().__init__(path, model)


@BENCHMARKS.register("pickscore")
class PickScoreBenchmark(Preference):
    """Average PickScore over prompts, such as Pick-a-Pic's or DrawBench's (Kirstain et al. 2023).

    path: a .txt or .jsonl file of prompts. model: as in the reward ``pickscore``. Scores are
    logits, about 18 to 24, as papers report them.
    """

    measure = "PickScore"
    source = "arXiv:2305.01569"
    judge = "pickscore"
    scale = 1.0

    def __init__(self, path: Path | None = None, model: str | None = None):
        super().__init__(path, model)


def styles(path: Path) -> list[Item]:
    """Read prompts of a file, or of a folder with one .json list per style."""
    if path.is_file() and path.suffix != ".json":
        return [
            Item(i, str(prompt.get("category", ALL)), prompt) for i, prompt in enumerate(read(path))
        ]
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    rows = []
    for file in files:
        for place, line in rows_of(file):
            text = line.get("prompt") if isinstance(line, Mapping) else line
            if not isinstance(text, str):
                raise UserError(f"{place}: expected a prompt, or an object with one")
            rows.append((file.stem if path.is_dir() else ALL, text))
    if not rows:
        raise UserError(f"{path}: no prompts there; expected .json files, one a style")
    return [Item(i, style, {"text": text}) for i, (style, text) in enumerate(rows)]
