"""Writes the table of docs/pipelines.md: which diffusers pipelines the policy ``pipeline`` trains.

    python scripts/dev/replay_table.py [--check | --try]

The data are those of the test (tests/fixtures/replay_cases.py), which states for each, as a tiny
model with random weights, that it works, or the message of its refusal. The suite tries most;
``--try`` tries the others, by the same test.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipelines.md"
BEGIN = "<!-- replayed: written by scripts/dev/replay_table.py -->"
END = "<!-- end of replayed -->"
sys.path.insert(0, str(ROOT))
from tests.fixtures.replay_cases import CASES, UNGUARDED, Case  # noqa: E402


def row(case: Case) -> str:
    """Write a row of the table."""
    result = f"refused: {case.refused}" if case.refused else "yes"
    rows = "" if case.refused else "together" if case.together else "one by one"
    needed = {name: value for name, value in case.options.items() if name not in UNGUARDED}
    options = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in needed.items())
    media = "" if case.refused or case.demonstrations else "no demonstrations"
    needs = options and f"needs {options}"
    notes = "; ".join(note for note in (case.note, needs, media) if note)
    return f"| {case.pipeline} | {result} | {rows} | {notes} |"


def table() -> str:
    """Write the plain pipelines as a list and the others as a table, by their names."""
    plain = sorted({case.pipeline for case in CASES.values() if is_plain(case)})
    rows = sorted(row(case) for case in CASES.values() if not is_plain(case))
    listed = f"Yes, prompts in one call, with demonstrations: {', '.join(plain)}.\n\nThe others:"
    head = "| pipeline | trained | prompts in a call | |\n|---|---|---|---|"
    return "\n".join([BEGIN, "", listed, "", head, *rows, "", END])


def is_plain(case: Case) -> bool:
    """Whether a pipeline works in every respect, with nothing to say about it."""
    options = set(case.options) - set(UNGUARDED)
    return not (case.refused or case.note or options) and case.together and case.demonstrations


def written(page: str) -> str:
    """Insert the table into the page."""
    before, _, rest = page.partition(BEGIN)
    return before + table() + rest.partition(END)[2]


def try_others() -> None:
    """Run the tests of training and dry run on the pipelines that the suite leaves out."""
    from mmrl.apps.dry_run import replays
    from tests.dry_run import test_replays
    from tests.policies.diffusion import test_any_pipeline as test

    replays.WORDS = test_replays.WORDS
    for name, case in CASES.items():
        if not case.refused:
            test_replays.test_a_pass_on_fakes_is_a_real_one(name, {})
            print(f"{case.pipeline}: rehearsed", flush=True)
    for name, case in CASES.items():
        if case.suite:
            continue
        if case.refused:
            test.test_what_cannot_be_replayed_is_refused_in_one_sentence(name)
        else:
            test.test_a_pipeline_without_noise_is_diffusers_own(name)
        print(f"{case.pipeline}: {'refused' if case.refused else 'works'}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="say whether the page is up to date")
    parser.add_argument(
        "--try", action="store_true", dest="tries", help="try the pipelines that no test tries"
    )
    arguments = parser.parse_args()
    if arguments.tries:
        try_others()
        return 0
    page = PAGE.read_text(encoding="utf-8")
    current = written(page)
    if arguments.check:
        return int(page != current)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
