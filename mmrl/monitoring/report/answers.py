"""Prepares the gallery of rollouts: answers, their boxes and rewards."""

from __future__ import annotations

from typing import Any

from mmrl.monitoring.report.curves import spread_out
from mmrl.monitoring.report.runs import Run

MOMENTS = 3
MOST_GROUPS = 4
MOST_ANSWERS = 16


def recorded(run: Run) -> list[int]:
    """List the iterations whose answers are recorded."""
    return sorted({i for line in run.rollouts if isinstance(i := line.get("iteration"), int)})


def rollouts(run: Run, only: int | None = None) -> list[dict[str, Any]]:
    """Return the groups of the first, a middle and the last recorded iteration, or of ``only`` one,
    ready to draw. Broken lines are noted."""
    known: dict[int, list[dict[str, Any]]] = {}
    for line in run.rollouts:
        if only is not None and line.get("iteration") != only:
            continue
        try:
            group = _group(line)
            known.setdefault(int(line["iteration"]), []).append(group)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            run.notes.append(
                f"rollouts.jsonl: a line is not understood ({type(error).__name__}: {error})"
            )
    return [
        {"iteration": i, "groups": known[i][:MOST_GROUPS]}
        for i in spread_out(sorted(known), MOMENTS)
    ]


def _group(line: dict[str, Any]) -> dict[str, Any]:
    width, height = line["size"] or (1, 1)
    answers = [_answer(raw) for raw in line["answers"][:MOST_ANSWERS]]
    names = list(dict.fromkeys(name for raw in line["answers"] for name in raw["rewards"]))
    for answer in answers:
        answer["earned"] = [answer["rewards"].get(name) for name in names]
    predicted = [
        _rectangle(box, width, height)
        | {"kind": "good" if (answer["advantage"] or 0) > 0 else "bad"}
        for answer in answers
        for box in answer["boxes"][:20]
    ]
    picture = str(line["picture"] or "")
    return {
        "prompt": str(line["prompt"]),
        "right": str(line["right"]),
        "picture": picture if picture.startswith("data:image/") else "",
        "width": int(width),
        "height": int(height),
        "boxes": [_rectangle(box, width, height) for box in line["boxes"]],
        "said": predicted,
        "names": names,
        "answers": answers,
        "flat": len({tuple(answer["earned"]) for answer in answers}) == 1,
    }


def _answer(raw: dict[str, Any]) -> dict[str, Any]:
    states = list(dict.fromkeys(str(state) for state in raw["status"].values()))
    return {
        "text": str(raw["text"]),
        "rewards": {str(name): value for name, value in raw["rewards"].items()},
        "advantage": raw["advantage"],
        "tokens": "" if raw["tokens"] is None else raw["tokens"],
        "cut": raw["finished"] is False,
        "status": ", ".join(states),
        "boxes": raw["boxes"],
    }


def _rectangle(box: list[float], width: float, height: float) -> dict[str, float]:
    """Turn shares into x, y, w, h in pixels of the picture; a reversed box has no extent."""
    x0, y0, x1, y1 = (float(v) * (width, height)[i % 2] for i, v in enumerate(box))
    size = {"w": round(max(0.0, x1 - x0), 2), "h": round(max(0.0, y1 - y0), 2)}
    return {"x": round(x0, 2), "y": round(y0, 2), **size}
