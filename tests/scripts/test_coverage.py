"""docs/coverage.yaml names only what exists, and the page is what it says."""

import pytest

from tests.fixtures.programs import load

coverage = load("coverage")
MAP = coverage.read_map()
GOOD = {
    "paper": "X",
    "names": ["advantages/grpo"],
    "models": ["trees"],
    "tests": ["tests/scripts/test_coverage.py::test_mistakes_are_noticed"],
    "configuration": "digits/flow_grpo",
    "status": "WORKS",
}


def test_every_name_test_and_file_of_the_map_exists():
    assert coverage.problems(MAP) == []


MISTAKES = [
    ({"names": ["advantages/grbo"]}, "nothing is registered as advantages/grbo"),
    ({"names": ["grpo"]}, "nothing is registered as grpo"),
    ({"tests": ["tests/scripts/test_coverage.py::test_x"]}, "there is no test"),
    ({"tests": ["tests/x.py::test_x"]}, "there is no test"),
    ({"models": ["flows"]}, "unknown kind of model"),
    ({"configuration": "digits/flow_grbo"}, "no configuration"),
    ({"configuration": None}, "it is WORKS, and has no configuration"),
    ({"options": ["advantage=grbo"]}, "unknown advantage 'grbo'"),
    ({"status": "works"}, "is none of"),
    ({"notes": "x"}, "unknown key 'notes'"),
    ({"tests": []}, "has no name or no test"),
    ({"status": "partial"}, "no note says what is missing"),
    ({"status": "missing"}, "has names or tests"),
]


def test_mistakes_are_noticed():
    assert coverage.problems({"k": GOOD}) == []
    for change, message in MISTAKES:
        (problem,) = coverage.problems({"k": GOOD | change})
        assert problem.startswith("k: ") and message in problem, change


@pytest.mark.skipif(not coverage.PAPERS.is_file(), reason="the list of papers is not there")
def test_the_page_is_up_to_date_with_the_list():
    listed = coverage.papers()
    assert {paper.key for paper in listed} == set(MAP)
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page(MAP, listed), (
        "run python scripts/dev/coverage.py"
    )
