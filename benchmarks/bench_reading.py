"""Measures the time of rewards to parse an answer: the median of typical ones, and the worst case
of 10,000 characters of nonsense. `python benchmarks/bench_reading.py [REWARD ...]`

CPU time is measured, and the minimum of several measurements counts, since other load only adds to
it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

from mmrl.core.registry import REWARDS, load_built_in
from rewards.answers import shapes
from rewards.answers.reading import (
    languages,
    names,
    numbers,
    options,
    published,
    spelled,
    statements,
)

PROMPTS = {
    "answer": {"answer": "12.5"},
    "classification": {"answer": "grey wolf"},
    "count": {"answer": 3},
    "choice": {"answer": "B", "choices": ["a cat", "a dog", "a bird"]},
    "chart": {"answer": "12.5"},
    "label_set": {"labels": ["cat", "dog"]},
    "vqa": {"answers": ["2"] * 10},
    "structured": {"answer": {"a": 1, "b": "x"}},
    "grounding": {"boxes": [[100, 200, 300, 400]]},
    "detection": {"boxes": [[100, 200, 300, 400]], "labels": ["dog"]},
    "point": {"boxes": [[100, 200, 300, 400]]},
    "gui": {"action": "click", "boxes": [[100, 200, 300, 400]]},
    "temporal": {"spans": [[10, 20]]},
    "tracking": {"tracks": [[1, 2, 3, 4], [2, 3, 4, 5]]},
    "table": {"answer": "| a | b |\n|---|---|\n| 1 | 2 |"},
    "transcription": {"answer": "a cat and a dog"},
    "text_similarity": {"answer": "a cat and a dog"},
    "bleu": {"answer": "a cat and a dog"},
    "key_steps": {"answer": "12", "key_steps": ["a cat", "a dog"]},
    "format": {},
    "maths": {"answer": "12"},
}
USUAL = (
    "<answer>12.5</answer>",
    "The answer is **B. a dog**.",
    "There are three apples on the table.",
    "<think>hm</think>\\boxed{\\frac{1}{2}}",
    '{"answer": "cat"}',
    "cat and dog",
    "5 million",
    "I think it is B, because the animal barks.",
    "grey wolf",
    '{"a": 1, "b": "x"}',
    '```json\n[{"bbox_2d": [100, 200, 300, 400], "label": "dog"}]\n```',
    "The dog is at (200, 300), and the box is [100, 200, 300, 400].",
    "from 0:10 to 0:20",
    "| a | b |\n|---|---|\n| 1 | 3 |",
)
PIECES = (
    *("1", "1 ", "1,", "1.", "0,", "-", "*", "**a", "_a ", "`x`", "#", "# a\n", "~", "x-", "'s "),
    *("$1", "\\frac{1}{2}", "\\text{", "\\boxed{", "{", "(", "[1,", "^2", "10^", "=", "1=", "|a|"),
    *(
        "the answer is ",
        "A, ",
        "B. ",
        "(B) ",
        "one ",
        "and ",
        "half a ",
        "twenty-",
        "5 cm ",
        "not ",
    ),
    *("\u00bd", "\u00bd ", "\u221a", "\u00e9", "%", "\\", "\n", "<think>"),
    *("[1, 2, 3, 4], ", "(1,2),", "(1, 2, 3, 4)", '{"bbox_2d": [1, 2, 3, 4]}, ', "{'a': [1, 2]}, "),
    *(
        "<box>[[1,2,3,4]]</box>",
        "<ref>a",
        "<loc_1>",
        "bbox: 1, 2, 3, 4 ",
        "x1=1, y1=2, ",
        "click(1, 2) ",
    ),
    *(
        "1:02 to ",
        "1s - 2s ",
        "start 1 ",
        "| a | b |\n",
        "<tr><td>a</td>",
        "<table>",
        "```\n",
        '"a": ',
        "dog: ",
    ),
    *('{"a":', "[", "[[", "<answer>", "<answer>1</answer>", "<think></think>", "<|im_end|>", " "),
    *(
        "\U0001f600",
        "\u2705 ",
        "The car is red. ",
        "The car is ",
        "die Katze ist ",
        "not, ",
        "so, ",
    ),
    *(
        "\u7b2c1\u79d2",
        "\u56fe\u4e2d",
        "\u5de6\u4e0a\u89d2(1, 2)\uff0c",
        "top-left (1, 2) ",
        "\\[ ",
        "$x$ is ",
    ),
    *(
        "\\begin{aligned}",
        "1 min 2 s ",
        "10 to ",
        "yes, ",
        "B, not A. ",
        "|---|",
        "\n\n1",
        "5 oder ",
        "yes, ",
        "twenty-a ",
        "<",
        "1 1e",
        "| |\n",
        "\u2705 -",
        '{"a":1},',
        "[1,2,3,4]",
        "*x=1,",
    ),
)
LENGTH = 10_000


def forget() -> None:
    """Clear the caches."""
    for remembered in (
        *(numbers.quantity_in, options._named, published.vqa_key, names._normal),
        *(
            shapes._records,
            spelled.spelled,
            spelled.whole_words,
            statements.predicates,
            languages.language_of,
        ),
    ):
        remembered.cache_clear()


def milliseconds(judge: Callable[[str], object], text: str, times: int) -> float:
    """Return the minimum of several measurements of CPU time."""
    least = float("inf")
    for _ in range(times):
        forget()
        begin = time.process_time()
        judge(text)
        least = min(least, 1e3 * (time.process_time() - begin))
    return least


def main(rewards: Sequence[str]) -> None:
    load_built_in()
    for name in rewards or PROMPTS:
        reward = REWARDS.build(name)
        prompt = {"text": "", **PROMPTS[name]}

        def judge(text: str, reward: object = reward, prompt: object = prompt) -> object:
            return reward([text], [prompt])  # type: ignore[operator]

        judge(USUAL[0])
        median = statistics.median(milliseconds(judge, text, 5) for text in USUAL)
        texts = {piece: (piece * LENGTH)[:LENGTH] for piece in PIECES}
        worst, piece = max((milliseconds(judge, text, 3), piece) for piece, text in texts.items())
        print(f"{name:15} median {median:6.3f} ms, worst {worst:6.1f} ms ({piece!r} repeated)")


if __name__ == "__main__":
    main(sys.argv[1:])
