"""Registers ``geneval_prompts`` and ``ocr_prompts``: prompts generated from the published
templates, or read from the official files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from mmrl.apps.benchmarks import words
from mmrl.config.values import Location
from mmrl.core.errors import UserError
from mmrl.core.registry import DATA
from mmrl.core.types import Prompt
from mmrl.data.prompts import Prompts
from rewards.images.geneval import COLORS, OBJECTS
from samplers.noise import Rng

Maker = Callable[["Chance"], Prompt]
PATIENCE = 60  # consecutive duplicates after which generation stops
PUBLISHED_MIX = {  # of Flow-GRPO's training prompts (arXiv:2505.05470, section 5)
    "position": 7,
    "counting": 5,
    "color_attr": 3,
    "colors": 1,
    "two_object": 1,
    "single_object": 0,
}
OF_A_TASK = 100  # held-out prompts of each of GenEval's tasks


class Chance:
    """Draws numbers that are a function of a seed, a name and a counter."""

    def __init__(self, seed: int, name: str):
        self.key = (seed, "benchmark prompts", name)
        self.drawn = 0
        self.numbers: list[float] = []

    def below(self, count: int) -> int:
        """Return a number from 0 to ``count`` - 1."""
        if not self.numbers:
            self.numbers = Rng.of(*self.key, self.drawn).permutation(1 << 14).tolist()
            self.drawn += 1
        return int(self.numbers.pop() / (1 << 14) * count)

    def of(self, names: tuple[str, ...]) -> str:
        return names[self.below(len(names))]

    def two_of(self, names: tuple[str, ...]) -> tuple[str, str]:
        """Return two different names."""
        first = self.below(len(names))
        second = (first + 1 + self.below(len(names) - 1)) % len(names)
        return names[first], names[second]


def article(name: str) -> str:
    """Put "a" or "an" before a name."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def plural(name: str) -> str:
    """Return a plural as GenEval writes it: "s", after an s "es"."""
    return name + ("es" if name.endswith("s") else "s")


def row(tag: str, text: str, include: list[dict[str, Any]], **extra: Any) -> Prompt:
    """Return a row of GenEval's metadata, with the text under both names."""
    return {"tag": tag, "include": include, **extra, "prompt": text, "text": text}


def single_object(chance: Chance) -> Prompt:
    name = chance.of(OBJECTS)
    return row("single_object", f"a photo of {article(name)}", [{"class": name, "count": 1}])


def two_object(chance: Chance) -> Prompt:
    first, second = chance.two_of(OBJECTS)
    include = [{"class": name, "count": 1} for name in (first, second)]
    return row("two_object", f"a photo of {article(first)} and {article(second)}", include)


def counting(chance: Chance) -> Prompt:
    """Write a counting prompt for two to four of a kind, excluding more."""
    name = chance.of(OBJECTS)
    count = 2 + chance.below(3)
    return row(
        "counting",
        f"a photo of {words.COUNTS[count]} {plural(name)}",
        [{"class": name, "count": count}],
        exclude=[{"class": name, "count": count + 1}],
    )


def colors(chance: Chance) -> Prompt:
    name = chance.of(OBJECTS[1:])  # no coloured persons
    color = chance.of(COLORS)
    include = [{"class": name, "count": 1, "color": color}]
    return row("colors", f"a photo of {article(color)} {name}", include)


def position(chance: Chance) -> Prompt:
    """Write a position prompt for two objects; the metadata lists the second first."""
    name, anchor = chance.two_of(OBJECTS)
    relation = chance.of(words.RELATIONS)
    include = [
        {"class": anchor, "count": 1},
        {"class": name, "count": 1, "position": [relation, 0]},
    ]
    return row("position", f"a photo of {article(name)} {relation} {article(anchor)}", include)


def color_attr(chance: Chance) -> Prompt:
    names = chance.two_of(OBJECTS[1:])
    hues = chance.two_of(COLORS)
    parts = [f"{article(hue)} {name}" for hue, name in zip(hues, names, strict=True)]
    include = [
        {"class": name, "count": 1, "color": hue} for hue, name in zip(hues, names, strict=True)
    ]
    return row("color_attr", f"a photo of {' and '.join(parts)}", include)


TASKS: dict[str, Maker] = {
    "single_object": single_object,
    "two_object": two_object,
    "counting": counting,
    "colors": colors,
    "position": position,
    "color_attr": color_attr,
}


def meaning(prompt: Prompt) -> str:
    """Return a key of a GenEval prompt's meaning, which does not depend on the order of objects."""
    parts = [json.dumps(entry, sort_keys=True) for entry in prompt["include"]]
    return f"{prompt['tag']} {' '.join(parts if prompt['tag'] == 'position' else sorted(parts))}"


def writing(prompt: Prompt) -> str:
    return str(prompt["text"])


def distinct(
    maker: Maker,
    count: int,
    chance: Chance,
    known: set[str],
    identity: Callable[[Prompt], str] = meaning,
) -> list[Prompt]:
    """Generate ``count`` prompts with meanings distinct from each other and from ``known``, which
    is extended; fewer if exhausted."""
    prompts: list[Prompt] = []
    misses = 0
    while len(prompts) < count and misses < PATIENCE:
        prompt = maker(chance)
        name = identity(prompt)
        misses = misses + 1 if name in known else 0
        if name not in known:
            known.add(name)
            prompts.append(prompt)
    return prompts


def geneval_suite(seed: int, of_a_task: int = OF_A_TASK) -> list[Prompt]:
    """Generate a test set like GenEval's: every single object, and up to ``of_a_task`` prompts of
    each other task."""
    known: set[str] = set()
    suite = [
        row("single_object", f"a photo of {article(name)}", [{"class": name, "count": 1}])
        for name in OBJECTS
    ]
    for tag in list(TASKS)[1:]:
        suite += distinct(TASKS[tag], of_a_task, Chance(seed, f"test {tag}"), known)
    return suite


def geneval_training(
    count: int, seed: int, mixture: Mapping[str, float], without: set[str]
) -> list[Prompt]:
    """Generate training prompts, tasks in the proportions of ``mixture``, excluding meanings in
    ``without``. A task that runs out of prompts repeats them."""
    total = sum(mixture.values())
    rows = []
    for tag, share in mixture.items():
        size = round(count * share / total)
        pool = distinct(TASKS[tag], size, Chance(seed, f"train {tag}"), set(without))
        if size and not pool:
            raise UserError(f"geneval_prompts: no {tag} prompt is left beside the held-out ones")
        rows += [pool[i % len(pool)] for i in range(size)]
    return rows


def lettering(chance: Chance) -> Prompt:
    """Generate an OCR prompt: a surface with two or three words in double quotes, in a setting."""
    text = f"{chance.of(words.OPENINGS)} {chance.of(words.ENDINGS)}"
    number = chance.below(4)
    text = f"{text} {10 + chance.below(90)}" if number == 0 else text
    surface = chance.of(words.SURFACES).format(text=f'"{text}"')
    setting = chance.of(words.SETTINGS)
    return {"text": f"{surface[0].upper()}{surface[1:]} {setting}.", "target": text}


@DATA.register("geneval_prompts")
class GenEvalPrompts:
    """Read GenEval's metadata from a folder, or generate prompts from its published templates.

    path: a folder with train_metadata.jsonl and test_metadata.jsonl (Flow-GRPO's dataset/geneval),
    or one such file; without it prompts are generated. count: number of training prompts. seed: of
    generation. mixture: tasks and their shares; by default Flow-GRPO's. held_out: generated
    held-out prompts of each task except single_object, which has all 80 objects; these, and
    reorderings of the same objects, are excluded from training.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def __init__(
        self,
        path: Location | None = None,
        count: Annotated[int, Ge(1), Le(10**6)] = 50_000,
        seed: int = 0,
        mixture: dict[str, float] | None = None,
        held_out: Annotated[int, Ge(1)] = OF_A_TASK,
    ):
        if path is not None:
            read = Prompts(path)
            self.train, self.held_out = read.train, read.held_out
            return
        shares = PUBLISHED_MIX if mixture is None else mixture
        unknown = sorted(set(shares) - set(TASKS))
        if unknown or sum(shares.values()) <= 0 or min(shares.values()) < 0:
            raise UserError(
                f"geneval_prompts: mixture {dict(shares)} must give shares above 0 to some of "
                f"{', '.join(TASKS)}"
            )
        self.held_out = geneval_suite(seed, held_out)
        self.train = geneval_training(count, seed, shares, set(map(meaning, self.held_out)))


@DATA.register("ocr_prompts")
class OCRPrompts:
    """Read the OCR task's prompts from a folder, or generate them: a text in double quotes.

    path: a folder with train.txt and test.txt (Flow-GRPO's dataset/ocr), or one file; without it
    prompts are generated. count: number of training prompts. seed: of generation. held_out: number
    of held-out prompts.
    """

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]

    def __init__(
        self,
        path: Location | None = None,
        count: Annotated[int, Ge(1), Le(10**5)] = 20_000,
        seed: int = 0,
        held_out: Annotated[int, Ge(1), Le(10**4)] = 1_000,
    ):
        if path is not None:
            read = Prompts(path)
            self.train, self.held_out = read.train, read.held_out
            return
        known: set[str] = set()
        self.held_out = distinct(lettering, held_out, Chance(seed, "test ocr"), known, writing)
        self.train = distinct(lettering, count, Chance(seed, "train ocr"), known, writing)
