"""A judge in this process, on tiny random models of real classes: equal to what transformers
computes by itself."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch

from mmrl.core.errors import UserError
from rewards.judges.checklist import Checklist
from rewards.judges.local_vlm import LocalVlm, first_tokens, load
from rewards.judges.points import Judge
from rewards.judges.question import Question, Unreadable, answer_of, named_choice
from tests.fixtures import tiny_vlms
from tests.fixtures.tiny_rewards import asked, pictures

FAMILIES = ["qwen2_5_vl", "internvl", "gemma3"]


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request):
    return LocalVlm(str(tiny_vlms.folder(request.param)), device="cpu", batch_size=3)


@pytest.fixture(scope="module")
def qwen():
    return LocalVlm(str(tiny_vlms.folder("qwen2_5_vl")), device="cpu", batch_size=3)


def encoded(vlm, question):
    """The question as the processor has it, alone."""
    parts = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in question.parts
    ]
    options = dict.fromkeys(("add_generation_prompt", "tokenize", "return_dict"), True)
    talk = [{"role": "user", "content": parts}]
    return vlm.processor.apply_chat_template(talk, return_tensors="pt", **options)


def questions(count=4):
    picture = [tiny_vlms.image(56, 56, seed) for seed in range(count)]
    return [
        Question((picture[i], "Is it so?" + " Really?" * i), choices=("Yes", "No"))
        for i in range(count)
    ]


def test_probabilities_are_the_softmax_over_the_tokens_of_the_choices(vlm):
    """The tokenizer has one token a byte: Yes begins with Y or y, No with N or n."""
    asked_for = questions()
    answers = vlm.ask(asked_for)
    tok = vlm.processor.tokenizer
    y, n = ([int(tok.convert_tokens_to_ids(letter)) for letter in p] for p in ("Yy", "Nn"))
    for question, chances in zip(asked_for, answers, strict=True):
        with torch.no_grad():
            logits = vlm.model(**encoded(vlm, question)).logits[0, -1].float()
        joint = logits[[*y, *n]].softmax(0)
        assert chances["Yes"] == pytest.approx(float(joint[:2].sum()), abs=1e-5)
        assert sum(chances.values()) == pytest.approx(1.0, abs=1e-6)
    assert len({round(answer["Yes"], 6) for answer in answers}) == len(answers)


def test_answers_in_words_are_those_of_generate(qwen):
    question = Question(
        (tiny_vlms.image(56, 56), "Say something."), read=lambda text: text, tokens=12
    )
    inputs = encoded(qwen, question)
    sequence = qwen.model.generate(**inputs, max_new_tokens=12, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ]
    want = answer_of(qwen.processor.tokenizer.decode(sequence, skip_special_tokens=True))
    assert qwen.ask([question, *questions(1), question])[::2] == [want, want]


def test_an_answer_that_cannot_be_read_is_asked_for_again_and_then_nan(qwen):
    before = qwen.usage.numbers()
    assert Judge(qwen, tokens=4)(pictures(2), asked(2)).isnan().all()
    after = qwen.usage.numbers()
    for name in ("asked_again", "unreadable"):
        assert after[name] - before[name] == 2


def test_two_judges_of_one_model_side_by_side_say_what_they_say_alone(qwen):
    """The model remembers the positions of the pictures it saw last: only one may use it at a
    time."""
    path = str(tiny_vlms.folder("qwen2_5_vl"))
    other = LocalVlm(path, device="cpu", batch_size=3)
    assert other.model is qwen.model is load(path, "float32", "cpu")[0]
    inside, most = [], []
    generate = qwen.model.generate

    def counted(*arguments, **options):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        try:
            return generate(*arguments, **options)
        finally:
            inside.pop()

    pairs = [(qwen, questions()), (other, [replace(q, parts=q.parts[::-1]) for q in questions()])]
    alone = [judge.ask(batch) for judge, batch in pairs]
    with mock.patch.object(qwen.model, "generate", counted), ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(judge.ask, batch) for judge, batch in pairs * 2]
        assert [job.result() for job in jobs] == alone * 2
    assert max(most) == 1


def test_mistakes_are_named(tmp_path, qwen):
    with pytest.raises(UserError, match="cannot load the judge"):
        LocalVlm(str(tmp_path))
    with pytest.raises(UserError, match="cannot tell 'seven' and 'six' apart by their first token"):
        first_tokens(qwen.processor.tokenizer, ("seven", "six"))
    with pytest.raises(UserError, match="positive weight"):
        Checklist(qwen, items={"bad": -1.0})


# reading answers


def test_a_choice_is_read_from_words_or_not_at_all(subtests):
    for text, want in [
        ("Yes.", "Yes"),
        ("**no**, it is not", "No"),
        ("I think the answer is: Yes", "Yes"),
        ("", None),
        ("<think>no</think> yes", "Yes"),
        ("<answer>No</answer>", "No"),
        ("Yes or no", "Yes"),
        ("it is yes and no", None),
        ("maybe", None),
    ]:
        with subtests.test(text=text, want=want):
            if want is None:
                with pytest.raises(Unreadable, match="it must be one of Yes, No"):
                    named_choice(answer_of(text), ("Yes", "No"))
            else:
                assert named_choice(answer_of(text), ("Yes", "No"))[want] == 1
