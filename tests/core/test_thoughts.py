"""Thoughts of every family are parted from what follows them."""

from mmrl.core.thoughts import THOUGHTS, opened_by, outside


def test_every_family_parts_thought_and_answer(subtests):
    for begin, end in THOUGHTS:
        with subtests.test(begin=begin, end=end):
            for text, pieces, ended in (
                (f"{begin}a{end}b", ["", "b"], True),
                (f"x{begin}a{end}b{begin}c{end}", ["x", "b", ""], True),
                (f"{begin}a", [""], False),
                (f"{begin}a <answer>b</answer>", [""], False),
                (f"{begin.upper()}a{end.upper()}b", ["", "b"], True),
            ):
                assert outside(text) == (pieces, ended)
            assert opened_by(f"user: x assistant: {begin}\n") == f"{begin}\n"
            assert opened_by(f"assistant: {begin}\n{end}\n") == ""
            if end != "<|end|>":  # a thought that the template opened
                assert outside(f"a{end}b") == (["b"], True)


def test_a_mark_of_another_family_closes_nothing():
    assert outside("<think>a [/THINK] b") == ([""], False)
    assert outside("<think>a <thinking> b</think>c") == (["", "c"], True)
    assert outside("plain") == (["plain"], True)
