"""Warms up the tiny Qwen2.5-VL before RL: its vision tower to see digits, then the model to answer
in the required format.

The second is supervised on answers of people, most of them *hasty*: they leave a margin around
boxes and overlook one digit of a crowd. So there is something left for RL to improve.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmrl.core.types import Prompt
from mmrl.worlds.album import SIDE, Style, album, clips
from mmrl.worlds.asking import GRID, Ask, answered, picture, questions_about
from mmrl.worlds.progress import Progress
from mmrl.worlds.recipes import PATCH, VLMRecipe
from mmrl.worlds.scenes import COLORS, DIGITS
from samplers.noise import Rng

IGNORED = -100  # of cross entropy
WOBBLE = 0.5  # digits are turned, sheared and rescaled a little
SORTS = {
    "few": Style(1, 2, 15.0, 24.0),
    "pairs": Style(1, 3, 13.0, 20.0),
    "crowd": Style(1, 6, 9.0, 14.0),
}
KINDS_OF: dict[str, tuple[Ask, ...]] = {
    "few": ("box", "box", "box", "box"),
    "pairs": ("boxes", "color", "digit", "left", "sum"),
    "crowd": ("count", "count", "box"),
    "clips": ("frame", "span"),
}  # a kind that is named often is drawn often, each time of a box with other loose sides
SHEET = SIDE // PATCH  # patches along a side
ASKED = 6  # targets of a patch: colour, digit, four sides of the box


def teach_eyes(model: Any, processor: Any, recipe: VLMRecipe, progress: Progress) -> None:
    """Train every patch on a digit to predict its colour, name and box in the model's own words.

    Replaces an encoder trained on captions of the web. The prediction heads are discarded, the
    word embeddings stay.
    """
    rng = Rng.of(recipe.seed, "eyes")
    pages = [
        album(recipe.scenes, rng.fold(name), "generator", s, WOBBLE) for name, s in SORTS.items()
    ]
    patches = torch.cat([_patches(processor, part.images) for part in pages])
    truth = torch.cat([_patch_targets(part.scenes, processor.tokenizer) for part in pages])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        heads = nn.Linear(recipe.width, ASKED * recipe.width)
    weights = [*model.model.visual.parameters(), *heads.parameters(), model.lm_head.weight]
    optimizer = torch.optim.AdamW(weights, recipe.eyes_lr, (0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.eyes_lr, total_steps=recipe.eyes_steps
    )
    grid = torch.tensor([[1, SHEET, SHEET]]).expand(recipe.eyes_batch, 3)
    for step in progress.steps("vision tower", recipe.eyes_steps, optimizer, schedule):
        rows = (
            rng.fold("rows").uniform(torch.arange(recipe.eyes_batch), (), step) * len(patches)
        ).long()
        features = model.model.get_image_features(
            patches[rows].flatten(0, 1), grid, return_dict=True
        ).pooler_output
        on = truth[rows][..., 0] != IGNORED  # [B, patches]
        states = heads(torch.stack(list(features))[on]).unflatten(-1, (ASKED, recipe.width))
        loss = F.cross_entropy(model.lm_head(states).flatten(0, 1), truth[rows][on].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()


def _patches(processor: Any, images: Tensor) -> Tensor:
    """Return the image processor's output for uint8 pictures [N, H, W, 3] of one size: [N, patches,
    numbers]."""
    patches = processor.image_processor(list(images.numpy()), return_tensors="pt")["pixel_values"]
    rows: Tensor = patches.view(len(images), -1, patches.shape[-1])
    return rows


def _patch_targets(scenes: list[Prompt], words: Any) -> Tensor:
    """Return the ids of the words for colour, digit and box of the object a patch lies on, [N,
    patches, 6]; IGNORED elsewhere."""
    ids = {
        word: words.convert_tokens_to_ids(word)
        for word in (*COLORS, *DIGITS, *map(str, range(SIDE + 1)))
    }
    truth = torch.full((len(scenes), SHEET, SHEET, ASKED), IGNORED)
    for n, scene in enumerate(scenes):
        for item, box in zip(scene["objects"], scene["boxes"]):
            columns, rows = (
                slice(round(a / PATCH), max(round(b / PATCH), round(a / PATCH) + 1))
                for a, b in (box[::2], box[1::2])
            )
            answers = [
                item["color"],
                DIGITS[item["digit"]],
                *(str(GRID * round(v / GRID)) for v in box),
            ]
            truth[n, rows, columns] = torch.tensor([ids[word] for word in answers])
    return truth.flatten(1, 2)


class Lessons(NamedTuple):
    """Holds scenes of one sort with several questions each, encoded once. Every question sees the
    picture and itself only."""

    # [N, S] the picture's tokens, then question and answer after question and answer, right-padded
    ids: Tensor
    part: Tensor  # [N, S] 0: the picture, 1, 2, ...: which question, -1: padding
    labels: Tensor  # [N, S] the ids of the answers and their ends, elsewhere IGNORED
    positions: Tensor  # [3, N, S] as if every question came right after the picture
    # patches [N, patches, numbers] and grid [N, 3], by the model's names for them
    media: dict[str, Tensor]


def teach_answers(model: Any, processor: Any, recipe: VLMRecipe, progress: Progress) -> None:
    """Fine-tune all weights, supervised; of a conversation only the answer is learnt."""
    rng = Rng.of(recipe.seed, "answers")
    lessons = {
        sort: prepare(model, processor, recipe, sort) for sort in dict.fromkeys(recipe.order)
    }
    optimizer = torch.optim.AdamW(
        model.parameters(), recipe.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.steps, pct_start=0.1
    )
    for step in progress.steps("answers", recipe.steps, optimizer, schedule):
        chosen = lessons[recipe.order[step % len(recipe.order)]]
        rows = (
            rng.fold("rows").uniform(torch.arange(recipe.batch), (), step) * len(chosen.ids)
        ).long()
        loss = answer_loss(model, chosen, rows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def answer_loss(model: Any, lessons: Lessons, rows: Tensor) -> Tensor:
    """Return the cross entropy of the answers' tokens."""
    media = {
        name: v[rows].flatten(0, 1) if name.startswith("pixel") else v[rows]
        for name, v in lessons.media.items()
    }
    hidden = model.model(
        input_ids=lessons.ids[rows],
        attention_mask=attention(lessons.part[rows])[:, None],
        position_ids=lessons.positions[:, rows],
        **media,
    ).last_hidden_state[:, :-1]
    labels = lessons.labels[rows][:, 1:]
    trained = labels != IGNORED
    return F.cross_entropy(model.lm_head(hidden[trained]), labels[trained])


def attention(part: Tensor) -> Tensor:
    """Return who attends to whom, [B, S, S] bool: earlier tokens of picture and own question."""
    before = torch.ones(part.shape[1], part.shape[1], dtype=torch.bool).tril()
    return before & ((part[:, None, :] == 0) | (part[:, :, None] == part[:, None, :]))


def prepare(model: Any, processor: Any, recipe: VLMRecipe, sort: str) -> Lessons:
    """Encode ``scenes`` scenes of the training scans, with up to ``turns`` questions each."""
    questions, media = examples(recipe, sort)
    medium = {"type": "video" if sort == "clips" else "image"}
    talk = [{"role": "user", "content": [medium]}]
    start = processor.apply_chat_template(talk, tokenize=False).partition("<|im_end|>")[0]
    inputs = processor(text=[start] * len(questions), return_tensors="pt", **media)
    patches = next(n for n in inputs if n.startswith("pixel"))
    grid = next(n for n in inputs if n.endswith("_thw"))
    rates = (
        {"second_per_grid_ts": inputs["second_per_grid_ts"]}
        if "second_per_grid_ts" in inputs
        else {}
    )
    first, _ = model.model.get_rope_index(
        inputs["input_ids"][:1],
        inputs["mm_token_type_ids"][:1],
        **{grid: inputs[grid][:1]},
        **rates,
    )
    shown = {
        patches: inputs[patches].view(len(questions), -1, inputs[patches].shape[-1]),
        grid: inputs[grid],
    }
    return _joined(inputs["input_ids"], first[:, 0], questions, processor.tokenizer, shown)


def _joined(
    start: Tensor, first: Tensor, questions: list[list[Pair]], words: Any, media: dict[str, Tensor]
) -> Lessons:
    """Join the pictures' tokens [N, S0] at positions [3, S0] and the questions after them."""
    behind = int(first.max()) + 1
    rows = []
    places = []
    for n, pairs in enumerate(questions):
        ids = start[n].tolist()
        part = [0] * start.shape[1]
        labels = [IGNORED] * start.shape[1]
        place = [[*row] for row in first.tolist()]
        for k, pair in enumerate(pairs):
            question_ids = words(f"{pair.question}<|im_end|><|im_start|>assistant").input_ids
            answered = words(f"{pair.answer}<|im_end|>").input_ids
            ids = ids + question_ids + answered
            part = part + [k + 1] * len(question_ids + answered)
            labels += [IGNORED] * len(question_ids) + answered
            place = [
                row + [behind + i for i in range(len(question_ids + answered))] for row in place
            ]
        rows.append((ids, part, labels))
        places.append(place)
    length = max(len(ids) for ids, _, _ in rows)

    def padded(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (length - len(values))

    positions = torch.tensor([[padded(axis, 0) for axis in place] for place in places])  # [N, 3, S]
    fills = (words.pad_token_id, -1, IGNORED)
    token_ids, parts, answers = (
        torch.tensor([padded(row[i], fill) for row in rows]) for i, fill in enumerate(fills)
    )
    return Lessons(token_ids, parts, answers, positions.transpose(0, 1), media)


class Pair(NamedTuple):
    question: str
    answer: str


def examples(recipe: VLMRecipe, sort: str) -> tuple[list[list[Pair]], dict[str, Any]]:
    """Return up to ``turns`` questions with their answers per scene, and the media as the processor
    takes them."""
    rng = Rng.of(recipe.seed, "conversations", sort)
    if sort == "clips":
        moving, scenes = clips(recipe.scenes, rng, "generator", WOBBLE)
        rates = [{"fps": 1.0, "total_num_frames": len(frames)} for frames in moving]
        media: dict[str, Any] = {"videos": list(moving.numpy()), "video_metadata": rates}
    else:
        images, scenes = album(recipe.scenes, rng, "generator", SORTS[sort], WOBBLE)
        media = {"images": [[picture(image)] for image in images]}
    rows = rng.rows(recipe.scenes, 1)
    order = rng.fold("order").uniform(rows, (64,)).tolist()
    hasty = (rng.fold("hasty").uniform(rows, (recipe.turns,)) < recipe.hasty).tolist()
    pairs = []
    for scene, ranks, moods in zip(scenes, order, hasty):
        known = [
            (kind, question) for kind in KINDS_OF[sort] for question in questions_about(scene, kind)
        ]
        chosen = [known[i] for i in sorted(range(len(known)), key=ranks.__getitem__)]
        pairs.append(
            [
                Pair(q["text"], answered(kind, q, h, recipe.margin))
                for (kind, q), h in zip(chosen, moods)
            ]
        )
    return pairs, media
