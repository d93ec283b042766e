"""The scores that a careful reader gives to answers, by the table answers.txt, and numbers in every
notation."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from num2words import num2words

from mmrl.core.registry import REWARDS, load_built_in
from mmrl.scoring import Scorer
from rewards.answers import maths
from rewards.answers.reading import Quantity, formulas, quantity
from rewards.answers.reading.published import textvqa_words, vqa_words
from rewards.answers.reading.units import UNITS
from rewards.answers.sandbox import TooSlow
from tests.fixtures.programs import load

load_built_in()
written = load("answers_table")
ROWS = [(row.reward, json.loads(row.prompt), row.score, row.text) for row in written.rows()]


def test_the_page_shows_the_table():
    page = written.PAGE.read_text(encoding="utf-8")
    assert f"{written.BEGIN}\n{written.table()}\n{written.END}" in page, (
        "run python scripts/dev/answers_table.py"
    )


def test_answers_are_read_as_a_careful_person_would(subtests):
    for name in sorted({reward for reward, *_ in ROWS}):
        with subtests.test(name=name):
            mine = [(prompt, score, text) for reward, prompt, score, text in ROWS if reward == name]
            scores = REWARDS.build(name)(
                [text for *_, text in mine], [p for p, *_ in mine]
            ).tolist()
            wrong = [
                f"{text!r} for {prompt}: {score:g}, a reader says {right:g}"
                for (prompt, right, text), score in zip(mine, scores)
                if score != pytest.approx(right, nan_ok=True)
            ]
            assert not wrong, "\n".join(wrong)


# Numbers in every notation

SUPERSCRIPT = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)
WHOLE: list[Callable[[int], str]] = [
    str,
    lambda n: f"{n:,}",
    lambda n: f"{n:,}".replace(",", "\u202f"),
    lambda n: f"{n:,}".replace(",", "'"),
    lambda n: f"{n:,}".replace(",", r"\,"),
    lambda n: f"{n:,}".replace(",", "{,}"),
    lambda n: str(n).replace("-", "\u2212"),
    lambda n: str(n).replace("-", "\u2013"),
    lambda n: str(n).replace("-", "- "),
    lambda n: str(n).replace("-", "minus "),
    lambda n: f"${n}$",
    lambda n: rf"\boxed{{{n}}}",
    lambda n: f"**{n}**",
    lambda n: f"{n}.0",
    lambda n: f"{100 * n}%",
    lambda n: f"{n} cm",
    lambda n: f"x = {n}",
    lambda n: f"The answer is {n}.",
    lambda n: f"{3 * n}/3",
    lambda n: rf"\frac{{{2 * n}}}{{2}}",
    lambda n: f"{n / 1000}e3",
    lambda n: rf"{n / 1000} \times 10^{{3}}",
    lambda n: f"{n / 1000} x 10{'3'.translate(SUPERSCRIPT)}",
    lambda n: f"{n / 10**6:.6f} million",
    lambda n: num2words(n),
    lambda n: num2words(n).replace(",", "").replace(" and ", " ").replace("-", " ").capitalize(),
    lambda n: "".join(chr(0xFF10 + int(c)) if c.isdigit() else "\uff0d" for c in str(n)),
]


@settings(max_examples=150, deadline=None)
@given(st.integers(-999_999, 999_999), st.sampled_from(range(len(WHOLE))))
def test_a_whole_number_reads_back_from_every_notation(n, notation):
    text = WHOLE[notation](n)
    value = quantity(text).value
    assert value is not None and value.equals(Quantity(n)), text
    assert not value.equals(Quantity(n + 1)) and (n == 0 or not value.equals(Quantity(-n)))


def test_separators_of_locales_read_back_where_they_mean_one_thing(subtests):
    for locale in "en de fr it es pt_BR ru de_CH hi ja pl nl sv cs en_IN".split():
        with subtests.test(locale=locale):
            format_decimal = pytest.importorskip("babel.numbers").format_decimal
            for n in (12.34, 1234.56, -98765.43, 1234567, 1234567.89, 0.125, 7, 42.5):
                value = quantity(format_decimal(n, locale=locale)).value
                assert value is not None and value.equals(Quantity(n)), format_decimal(
                    n, locale=locale
                )


def test_units_are_those_of_physics():
    constants = pytest.importorskip("scipy.constants")
    names = "inch yard:yd mile:mi lb oz acre mph kmh knot atm psi light_year:ly calorie:cal week"
    for name in [*names.split(), "foot", "hectare:ha"]:
        theirs, _, ours = name.partition(":")
        assert UNITS[ours or theirs].factor == pytest.approx(getattr(constants, theirs)), name
    assert UNITS["gal"].factor == pytest.approx(1000 * constants.gallon)


# The published rules

# text -> what VQA v2's and TextVQA's evaluations make of it, as lmms-eval 0.7 runs them
VQA = {
    "A cat": ("cat", "cat"),
    "The cat.": ("cat", "cat"),
    "two dogs": ("2 dogs", "2 dogs"),
    "None": ("0", "0"),
    "1,000": ("1000", "1000"),
    "1.5": ("1.5", "1.5"),
    ".5": (".5", ".5"),
    "5.": ("5", "5"),
    "U.S.": ("us", "us"),
    "dont know": ("don't know", "don't know"),
    "yes, no": ("yes no", "yes no"),
    "yes,no": ("yes no", "yesno"),
    "dog's": ("dog's", "dog 's"),
    "black/white": ("black white", "black white"),
    "black / white": ("black white", "black white"),
    "t-shirt": ("t shirt", "t shirt"),
    "(b)": ("b", "b"),
    "Is it?": ("is it", "is it"),
    "eleven": ("eleven", "eleven"),
    "somebody'd": ("somebodyd", "somebodyd"),
    "an apple and the pear": ("apple and pear", "apple and pear"),
}


def test_vqa_evens_out_what_the_published_evaluations_do(subtests):
    for text in VQA:
        with subtests.test(text=text):
            assert (vqa_words(text), textvqa_words(text)) == VQA[text]


def test_a_place_that_counts_from_nought_or_one_is_refused():
    reward = REWARDS.build("choice")
    (verdict,) = reward.verdicts(["B"], [{"answer": 1, "choices": ["a cat", "a dog"]}])
    assert verdict.score != verdict.score and "write the letter" in verdict.note
    assert reward(["B"], [{"answer": 3, "choices": [2, 3]}]).tolist() == [1]


def test_formulas_that_differ_at_a_point_are_not_asked_about(monkeypatch):
    def never(*questions):
        raise AssertionError(questions)

    monkeypatch.setattr(maths.WORKERS, "ask_all", never)
    sums = ["+".join(rf"\sin({k}x)" for k in range(2, 20 + i)) for i in range(64)]
    formulas = [rf"\boxed{{{text}}}" for text in (*sums, "(1+x)^{999}", "(x+y+z+w)^{40}")]
    reward = REWARDS.build("maths")
    assert not reward(formulas, [{"answer": "x^2+1"}] * len(formulas)).any()


def test_answers_that_take_too_long_are_counted_and_said(monkeypatch, caplog):
    monkeypatch.setattr(maths, "EQUAL", {})
    monkeypatch.setattr(
        maths.WORKERS, "ask_all", lambda questions: [TooSlow("1 s")] * len(questions)
    )
    reward = REWARDS.build("maths")
    verdicts = reward.verdicts(
        [r"\boxed{1+x^2}", r"\boxed{x^2 + 1 + 0}"], [{"answer": "x^2+1"}] * 2
    )
    assert [v.status for v in verdicts] == ["unparseable"] * 2
    assert Scorer({"m": reward}).counters() == {"m/too_slow": 2}
    assert "took more than" in caplog.text and caplog.text.count("reward maths") == 1


def test_powers_that_explode_are_seen_in_the_tree(subtests):
    for text, explosive in [
        ("3^{100*100*100*100}", True),
        ("9^{9^{9}}", True),
        ("2**3**4**5", True),
        ("(999*999*999)!", True),
        ("**1234**", False),
        ("2^{3^{4}}", False),
        ("(x+1)^{999}", False),
        ("10^{400}", False),
    ]:
        with subtests.test(text=text, explosive=explosive):
            assert formulas.explodes(text) is explosive
