"""Judges served by a server: what is asked and read back, and what happens when the server
misbehaves."""

from __future__ import annotations

import base64
import io
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.registry import REWARDS
from mmrl.scoring import Scorer
from rewards.base.media import to_uint8
from rewards.judges.checklist import Checklist
from rewards.judges.edit import EditJudge
from rewards.judges.listener import Listener, reasoning
from rewards.judges.pairwise import Pairwise, pairings, strengths, win_rates, with_pivot
from rewards.judges.points import Judge
from rewards.judges.question import Question, Unreadable, asked_schema, scores_schema
from rewards.judges.samples import to_pil
from rewards.judges.templates import BUILT_IN
from rewards.judges.yes_no import YesNo
from rewards.servers import chat, pool
from rewards.servers.chat_server import ChatServer
from tests.fixtures import waiting
from tests.fixtures.fake_chat import fake_chat, stats
from tests.fixtures.reward_servers import answering, free_port, silence

LEVELS = [0.0, 0.2, 0.6, 1.0]  # of grey; exact in 8 bits


@pytest.fixture(scope="module")
def url():
    with fake_chat() as address:
        yield address


def server(url, **options):
    quick = {"timeout": waiting.HANG, "backoff": 0.02, "retry_seconds": 0.0, "format": "png"}
    return ChatServer(url, **quick | options)


def greys(levels=LEVELS):
    return torch.tensor(levels).view(-1, 1, 1, 1).expand(-1, 3, 16, 16)


def prompts(count=4, text="a grey square"):
    return [{"text": f"{text} {i}"} for i in range(count)]


def sent_with(url, words=""):
    """The text of the last question that holds these words."""
    return [body["text"] for body in stats(url)["bodies"] if words in body["text"]][-1]


REASONS = '{"reason": "x", "score": 8}'


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ({"content": REASONS}, 0.8),
        ({"content": '{"score": 8}'}, 0.8),
        ({"content": '{"reason": "x", "score": "8/10", "confidence": 1}'}, 0.8),
        ({"content": '{"reason": "x", "score": "8 out of 10"}'}, 0.8),
        ({"content": '{"reason": "x", "score": "8/100"}'}, "not on the scale that ends at 10"),
        ({"content": f"<think>first {REASONS[:-2]}3}}, or </think>{REASONS}"}, 0.8),
        ({"content": f"perhaps 3 </think>{REASONS}"}, 0.8),
        ({"content": f"<think>perhaps {REASONS}, or"}, "ends before its reasons do"),
        ({"content": f"<think>a</think> <thinking>{REASONS}, or"}, "ends before its reasons do"),
        ({"content": None, "reasoning_content": REASONS}, 0.8),
        ({"content": None, "reasoning": f"```json\n{REASONS}\n```"}, 0.8),
        ({"content": None, "reasoning_content": f"perhaps {REASONS} or"}, "--reasoning-parser"),
        ({"content": None}, "it holds no JSON object"),
    ],
)
def test_forms_of_a_judgement(message, want):
    from openai.types.chat.chat_completion import Choice

    said = {"role": "assistant", **message}
    choice = Choice(finish_reason="stop", index=0, message=said, logprobs=None)
    question = Question(("?",), schema=scores_schema(("score",), 0.0, 10.0))
    if isinstance(want, float):
        assert chat.read_choice(choice, question)["score"] / 10 == pytest.approx(want)
        return
    with pytest.raises(Unreadable, match=want):
        chat.read_choice(choice, question)


def test_pictures_go_as_jpeg_of_at_most_1024_pixels_and_their_bytes_are_counted(url):
    noise = torch.rand(1, 3, 16, 12, generator=torch.Generator().manual_seed(0))
    clouds = torch.nn.functional.interpolate(noise, (1200, 900), mode="bicubic").clamp(0, 1)
    photo = to_pil(to_uint8(clouds)[0])
    want = np.asarray(photo.resize((768, 1024), Image.Resampling.BICUBIC), float)
    for encoding, error in (("jpeg", 4), ("webp", 4), ("png", 0.5)):
        part = ChatServer(url, format=encoding)._part(photo)
        kind, content = part["image_url"]["url"].split(",")
        picture = Image.open(io.BytesIO(base64.b64decode(content)))
        assert kind == f"data:image/{encoding};base64" and picture.size == (768, 1024)
        assert np.abs(np.asarray(picture, float) - want).mean() < error
    judge = Judge(server(url))
    judge(greys(), prompts())
    counted = judge.counters()
    assert counted["bytes_sent"] > 4 * 100 and counted["requests"] == 4
    assert counted["bytes_per_request"] == counted["bytes_sent"] / 4


def test_every_template_gives_the_score_that_the_server_saw(url):
    model = server(url)
    want = torch.tensor(LEVELS)
    aspects = {"template": "unified_reward_2", "aspects": ["alignment"]}
    for options, expected in (
        ({}, want),
        ({"template": "unified_reward"}, (1 + 4 * want) / 5),  # published: 1..5 over 5
        (aspects, (1 + 4 * want) / 5),
        ({"template": "unified_reward_2"}, torch.full((4,), 0.6)),  # (v + 0.5 + 1 - v) / 3
    ):
        torch.testing.assert_close(Judge(model, **options)(greys(), prompts()), expected)
    scores = YesNo(model)(greys(), prompts())
    torch.testing.assert_close(scores, want, atol=1e-6, rtol=0)  # 0.9 v + 0.1 v over that + 1 - v
    sent = stats(url)["bodies"]
    assert {body["model"] for body in sent} == {"fake"}
    assert {body["temperature"] for body in sent} == {0}
    assert set().union(*sent) >= {"response_format", "logprobs"}
    asked = asked_schema(scores_schema(("score",), 0.0, 10.0))
    assert asked["required"] == ["reason", "score"] and asked["additionalProperties"] is False


def test_videos_show_evenly_spaced_frames_and_a_broken_picture_asks_nothing(url):
    video = torch.stack([greys()[[k]].expand(1, 3, 16, 16) for k in (3, 0, 0, 0)], 1).clone()
    model = server(url)
    assert float(Judge(model, frames=2)(video, prompts(1))) == pytest.approx(1.0)
    media = greys().clone()
    media[2, 0, 0, 0] = torch.nan
    requests = model.usage.requests
    assert Judge(model)(media, prompts()).isnan().tolist() == [False, False, True, False]
    assert model.usage.requests == requests + 3


def test_answers_are_shown_with_the_pictures_of_their_prompt(url, tmp_path):
    Image.new("L", (8, 8), 153).save(tmp_path / "grey.png")
    pictured = [{"text": "how bright?", "images": [str(tmp_path / "grey.png")]}]
    pictured += [{"text": "x", "image": Image.new("RGB", (4, 4))}]
    assert Judge(server(url))(["bright", "dark"], pictured).tolist() == pytest.approx([0.6, 0.0])
    assert "Answer to be judged:\nbright" in sent_with(url, "how bright?")
    with pytest.raises(UserError, match="cannot be read: .*nowhere.png"):
        Judge(server(url))(["a"], [{"text": "x", "images": ["nowhere.png"]}])


def test_checklists_and_rubrics_are_weighted_shares(url):
    """The server says yes while the brightness is above i / 10: of 0.2 to the first and second."""
    model = server(url)
    items = {"first": 1.0, "second": 2.0, "third": 1.0}
    faults = {"good": 1.0, "a fault": -0.5}
    listed = {"text": "a", "checklist": ["one", "two", "three", "four"]}
    rubric = {"items": ["a", "b"], "levels": 5}
    for options, level, prompt, share in (
        ({"items": items}, 0.2, {"text": "a"}, 3 / 4),
        ({}, 0.2, listed, 2 / 4),
        (rubric, 0.6, {"text": "a"}, 3 / 5),
        ({"items": faults}, 0.2, {"text": "a"}, 0.5),
    ):
        score = Checklist(model, **options)(greys([level]), [prompt])
        assert score.item() == pytest.approx(share), options
    for options, unmet in ((items, ["third"]), (faults, ["a fault"])):
        assert Checklist(model, items=options).unmet(greys([0.2]), prompts(1)) == [unmet]
    with pytest.raises(UserError, match="expects points in 'checklist' of a prompt"):
        Checklist(model)(greys([0.2]), prompts(1))


def test_a_listener_reads_the_reasoning_and_never_the_answer(url):
    for text, heard in (
        ("<think>two and two</think><answer>4</answer>", "two and two"),
        ("It is \\boxed{4} because <answer>4</answer>.", "It is  because ."),
        (r"It is \boxed{\frac{1}{2}}, or <answer>x</answer>so", "It is , or so"),
        ("[THINK]two and two[/THINK] It is 4.", "two and two"),
        ("a <answer>4", "a"),
    ):
        assert reasoning(text) == heard
    sums = [{"text": "sum?", "answer": "4", "images": [Image.new("L", (4, 4), 204)]}]
    reasonings = ["<think>SECRET two and two</think><answer>FOUR</answer>"]
    assert float(Listener(server(url))(reasonings, sums)) == pytest.approx(0.8)
    shown = sent_with(url, "SECRET")
    assert "FOUR" not in shown and 'is "4" the right answer' in shown
    with pytest.raises(UserError, match="not among 'choices'"):
        Listener(server(url))(reasonings, [{"text": "x", "answer": "e", "choices": ["a", "b"]}])


# comparisons


@pytest.fixture(scope="module")
def biased():
    """A server that prefers the first of two."""
    with fake_chat("--bias", "0.1") as address:
        yield address


def test_a_preference_for_a_place_cancels(url, biased):
    """With p = 1/2 + (v_i - v_j) / 2 + bias for the first, the mean of both orders is free of the
    bias."""
    for address in (url, biased):
        rates = Pairwise(server(address))(greys([0.2, 0.4, 0.6]), [{"text": "same"}] * 3)
        torch.testing.assert_close(rates, torch.tensor([0.35, 0.5, 0.65]), atol=1e-5, rtol=0)


def test_unified_reward_pairs_rank_and_draw(url):
    media = greys([0.2, 0.6, 0.6, 1.0, 0.0])
    two_prompts = [{"text": "one"}] * 3 + [{"text": "two"}] * 2
    scores = Pairwise(server(url), template="unified_reward")(media, two_prompts)
    assert scores.tolist() == pytest.approx([0.0, 0.75, 0.75, 1.0, 0.0])
    with pytest.raises(UserError, match="at least two of each"):
        Pairwise(server(url))(media, [{"text": "one"}] * 4 + [{"text": "two"}])


def test_brpo_asks_about_every_sample_and_the_pivot(biased):
    """1, -1 or 0 against one of the group; two questions for each of the others."""
    levels = [0.2, 0.6, 0.6, 1.0, 0.0, 0.9]
    given = [{"text": "one"}] * 4 + [{"text": "two"}] * 2
    model = server(biased)
    scores = Pairwise(model, method="pivot")(greys(levels), given)
    assert model.usage.numbers()["requests"] == 2 * (3 + 1)
    for group in (range(4), range(4, 6)):
        ((_, pivot), *_) = with_pivot(greys(levels), given, list(group))
        for row in group:
            assert scores[row] == (levels[row] > levels[pivot]) - (levels[row] < levels[pivot])
    with pytest.raises(UserError, match="leave out opponents"):
        Pairwise(model, method="pivot", opponents=2)


def test_a_judge_that_sees_only_the_position_draws_every_pair():
    class Positions:
        usage = None

        def ask(self, questions):
            return [{"1": self.chance, "2": 1 - self.chance} for _ in questions]

    model = Positions()
    pivot, rates = (Pairwise(model, method=method) for method in ("pivot", "win_rate"))
    for chance in (0.13, 0.4, 0.9, 1.0):  # with x + 1 - x below 1, but for the last
        model.chance = chance
        assert pivot(greys(), [{"text": "same"}] * 4).tolist() == [0.0] * 4
        assert rates(greys(), [{"text": "same"}] * 4).tolist() == [0.5] * 4


def test_bradley_terry_recovers_strengths_and_stays_finite():
    true = torch.tensor([-1.0, 0.0, 0.25, 0.75], dtype=torch.float64)
    wins = {(i, j): float(torch.sigmoid(true[i] - true[j])) for i, j in pairings(range(4), None)}
    found = strengths(wins, 4, prior=1e-9)
    torch.testing.assert_close(found, true - true.mean(), atol=1e-5, rtol=0)
    always = strengths({(0, 1): 1.0, (0, 2): 1.0, (1, 2): 0.5}, 3)
    assert always.isfinite().all() and always[0] > always[1] == pytest.approx(float(always[2]))
    assert win_rates({(0, 1): 0.8, (1, 2): 0.4}, 3).tolist() == pytest.approx([0.8, 0.3, 0.6])


def test_a_ring_of_pairs_is_fair_and_has_no_pair_twice(subtests):
    for size, opponents in [(6, 2), (7, 4), (5, 10), (4, None)]:
        with subtests.test(size=size, opponents=opponents):
            pairs = pairings(range(size), opponents)
            met = {sum(i in pair for pair in pairs) for i in range(size)}
            assert met == {min(opponents or size, size - 1)}
            assert len({frozenset(pair) for pair in pairs if len(set(pair)) == 2}) == len(pairs)


# failures


def test_one_fault_changes_no_number(url, subtests):
    for fault in ["503", "429", "drop", "half", "garbage", "badjson", "wrong", "empty"]:
        with subtests.test(fault=fault):
            model = server(url)
            faulty = prompts(text=f"fault:{fault}:1 once")
            torch.testing.assert_close(Judge(model)(greys(), faulty), torch.tensor(LEVELS))
            spoken = fault in ("badjson", "wrong", "empty")
            assert (model.usage.asked_again if spoken else model.usage.retries) >= 1
            assert model.usage.unanswered == 0


@pytest.mark.parametrize("fault", ["500", "huge", "wrong", "refuse"])
def test_a_question_that_keeps_failing_is_nan_and_no_other(url, fault, monkeypatch):
    monkeypatch.setattr(pool, "LONGEST", 3000)
    model = server(url, retries=2, concurrency=8, price_in=2.0, price_out=10.0)
    faulty = prompts()
    faulty[1] = {"text": f"fault:{fault}:99 always"}
    scorer = Scorer({"judge": Judge(model)})
    scores = scorer(greys(), faulty)["judge"]
    assert scores.isnan().tolist() == [False, True, False, False]
    assert scorer.failures["judge"].count == 1
    torch.testing.assert_close(scores[[0, 2, 3]], torch.tensor(LEVELS)[[0, 2, 3]])
    counted = model.usage.numbers()
    assert counted["answers"] == 3
    tokens = counted["tokens_in"], counted["tokens_out"]
    assert counted["cost"] == pytest.approx(tokens[0] * 2e-6 + tokens[1] * 10e-6)


def test_a_rate_limit_spaces_requests(url, monkeypatch):
    now = [100.0]
    sent = []
    monkeypatch.setattr(chat, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_by(seconds):
        now[0] += seconds

    pace = chat.Pace(rate=1200)
    for _ in range(6):
        pace.wait(SimpleNamespace(wait=pass_by))
        sent.append(now[0])
    assert sent == pytest.approx([100 + 0.05 * i for i in range(6)])
    pace.hold(2.0)  # a server's Retry-After
    pace.wait(SimpleNamespace(wait=pass_by))
    assert now[0] == pytest.approx(100.25 + 2)


def test_formats_that_a_server_lacks_are_done_without(url):
    model = server(url)
    for judge, fault, score, lacking in (
        (Judge(model), "noformat", 0.6, "response_format"),
        (YesNo(model), "nologprobs", 1.0, "logprobs"),
    ):
        faulty = prompts(1, f"fault:{fault}:0")
        assert float(judge(greys([0.6]), faulty)) == pytest.approx(score)
        assert not model.supported[lacking] and model.usage.unanswered == 0


def test_a_dead_server_costs_one_time_out_and_a_second_one_takes_over(url, caplog):
    dead = f"http://127.0.0.1:{free_port()}/v1"
    with caplog.at_level(logging.WARNING):
        assert Judge(server(dead, model="fake"))(greys(), prompts()).isnan().all()
    assert dead in caplog.text
    second = Judge(server([dead, url], model="fake"))
    torch.testing.assert_close(second(greys(), prompts()), torch.tensor(LEVELS))
    with answering(silence) as mute:
        model = server(f"{mute}/v1", model="fake", timeout=0.2, concurrency=2)
        assert Judge(model)(greys([0.2] * 20), prompts(20)).isnan().all()
        assert model.servers[0].requests <= 4  # those that were on their way when one ran out
    with pytest.raises(UserError, match="no value for 4 of 4 questions"):
        Judge(server(dead, model="fake"), on_failure="stop")(greys(), prompts())
    with pytest.raises(UserError, match="refuses every question: 400, as told: refuse"):
        Judge(server(url))(greys(), prompts(text="fault:refuse:99"))


def test_the_key_comes_from_the_environment_and_is_never_repeated(monkeypatch, caplog):
    words = ("--key", "sk-right", "--model", "small", "--model", "large")
    with fake_chat(*words) as address:

        def ask(key, **options):
            monkeypatch.setenv("MY_KEY", key)
            judge = Judge(server(address, key_env="MY_KEY", concurrency=3, **options))
            return judge(greys([0.2] * 12), prompts(12, "fault:meet:99"))

        # it holds the first question until a second one has come
        assert ask("sk-right", model="small").tolist() == pytest.approx([0.2] * 12)
        assert 2 <= stats(address)["most_at_once"] <= 3
        with pytest.raises(UserError, match="refused the key") as error:
            ask("sk-wrong", model="small")
        assert "sk-wrong" not in str(error.value) + caplog.text and "***" in str(error.value)
        with pytest.raises(UserError, match="has 2 models; name one in `model`: small, large"):
            ask("sk-right")
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="MY_KEY .*is not set"):
        server("http://127.0.0.1:1/v1", key_env="MY_KEY")


def test_nothing_of_the_environment_reaches_a_server(url, monkeypatch):
    """openai's client would send an account's name, its key and any header that the environment
    names."""
    names = "OPENAI_API_KEY OPENAI_ADMIN_KEY OPENAI_ORG_ID OPENAI_PROJECT_ID".split()
    proxies = dict.fromkeys(("HTTP_PROXY", "ALL_PROXY"), "http://mine:mine@127.0.0.1:1")
    secrets = dict.fromkeys(names, "mine") | {"OPENAI_CUSTOM_HEADERS": "X-Mine: yes"} | proxies
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MMRL_JUDGE_KEY", raising=False)
    assert float(Judge(server(url))(greys([0.2]), prompts(1))) == pytest.approx(0.2)
    headers = stats(url)["headers"][-1]
    assert not {"authorization", "x-mine"} & set(headers) and "mine" not in str(headers)


def test_groups_are_distinguished_by_the_scorer(url):
    scorer = Scorer({"pairs": Pairwise(server(url))})
    scores = scorer(greys([0.2, 0.6, 0.2, 0.6]), [{"text": "one"}] * 4, [0, 0, 1, 1])["pairs"]
    assert scores.tolist() == pytest.approx([0.3, 0.7, 0.3, 0.7], abs=1e-5)


# templates


def test_templates_of_ones_own(url, tmp_path):
    jinja = "{{ media }}Is {{ text | upper }} of {{ style }}? Final Score: 1 to 5"
    (tmp_path / "mine.j2").write_text(jinja)
    (tmp_path / "mine.txt").write_text("{media} {text}, {style}: Final Score: 1 to 5, {{as is}}")
    styled = [{"text": "a cat", "style": "oil"}]
    options = {"pattern": r"Score:\**\s*([\d.]+)", "low": 1, "high": 5}
    for name, words in {"mine.j2": "Is A CAT of oil?", "mine.txt": "a cat, oil"}.items():
        judge = Judge(server(url), template=str(tmp_path / name), **options)
        score = float(judge(greys([0.5]), styled))
        assert score == pytest.approx((1 + 4 * 128 / 255) / 5, abs=1e-4)
        assert words in sent_with(url) and judge.card.needs == ("style", "text")
        with pytest.raises(UserError, match="needs 'style' of the prompt"):
            judge(greys([0.5]), prompts(1))


def test_a_template_with_a_mistake_is_refused_when_it_is_read(tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    model = server("http://127.0.0.1:1/v1")
    for name, text, options, says in [
        ("a.j2", "{{ text", {}, r"a.j2:1: unexpected end of template"),
        ("a.j2", "one\n{% if %}", {}, r"a.j2:2: "),
        ("a.txt", "{text.__class__}", {}, "is not the name of a field"),
        ("a.txt", "{text", {}, "a.txt: expected '}'"),
        ("a.txt", "{text}", {"pattern": "("}, "is not a regular expression"),
        ("a.txt", "{text}", {"pattern": "Score"}, "has no group"),
        ("a.txt", "{text}", {"low": 5.0, "high": 1.0}, "low 5 is not below high 1"),
        ("a.txt", "{text}", {"aspects": ["style"]}, "has no score called 'style'"),
        ("unified_rewrd", None, {}, "did you mean 'unified_reward'"),
        ("nowhere.j2", None, {}, "cannot be read"),
    ]:
        if text is not None:
            (tmp_path / name).write_text(text)
        with subtests.test(name=name, text=text), pytest.raises(UserError, match=says):
            Judge(model, template=name, **options)


def test_a_prompt_cannot_smuggle_pictures_or_code_in_nor_the_answer_out(url, tmp_path):
    sly = "{{ 7 * 7 }} {media} \x00media\x00 {% raw %}"
    assert float(Judge(server(url))(greys([0.6]), [{"text": sly}])) == pytest.approx(0.6)
    assert sly.replace("\x00", "") in sent_with(url)
    answered = [{"text": "a", "answer": "the right one", "kind": "odd"}]
    for reward in (Judge(server(url)), YesNo(server(url)), Checklist(server(url), items=["x"])):
        reward(greys([0.6]), answered)
        assert "the right one" not in sent_with(url)
    (tmp_path / "open.j2").write_text("{{ prompt.answer }}, {{ answer }}?")
    Judge(server(url), template=str(tmp_path / "open.j2"))(["mine"], answered)
    assert "the right one, mine?" in sent_with(url)


JUDGES = ["judge", "judge_yes_no", "judge_checklist", "judge_pairwise", "judge_listener"]


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_keeps_the_contract_of_rewards(name, url):
    options = {"judge_checklist": {"items": ["one", "two"], "levels": 9}}.get(name, {})
    reward = REWARDS.build(name, model=server(url), **options)
    first = {"text": "a", "answer": "b", "image": Image.new("L", (4, 4), 51)}
    paired = [first] * 2 + [first | {"text": "other", "image": Image.new("L", (4, 4), 204)}] * 2
    media = greys([0.2, 0.4, 0.6, 1.0])
    if name == "judge_listener":
        media = ["<think>one</think>", "<think>two</think>", "three", "four"]
    values = reward(media, paired)
    assert values.shape == (4,) and values.dtype == torch.float32 and values.isfinite().all()
    assert values.min() < values.max()
    parts = torch.cat([reward(media[:2], paired[:2]), reward(media[2:], paired[2:])])
    torch.testing.assert_close(parts, values)
    turned = media[::-1] if isinstance(media, list) else media.flip(0)
    torch.testing.assert_close(reward(turned, paired[::-1]), values.flip(0), atol=1e-6, rtol=0)


# counts, edits, reasons


def test_questions_of_geneval_2_are_asked_one_by_one(url):
    """A count has a digit as its answer; a prompt's score is the geometric mean of its atoms."""
    vqa = [["Is there a square?", "Yes"], ["How many squares?", "four"], ["Is it red?", "no"]]
    asked = [{"text": "four squares", "vqa_list": vqa}] * 3
    media = greys([0.2, 0.6, 1.0])
    mean = YesNo(server(url), questions="vqa_list")
    geometric = YesNo(server(url), questions="vqa_list", combine="geometric")(media, asked)
    means = mean(media, asked)
    for row, v in enumerate((0.2, 0.6, 1.0)):
        assert float(means[row]) == pytest.approx((v + v + 1 - v) / 3, abs=1e-5)
        product = v * v * max(1 - v, 1e-12)
        assert float(geometric[row]) == pytest.approx(product ** (1 / 3), abs=1e-3)

    def counted(answer):
        return float(mean(media[:1], [{"text": "x", "vqa_list": [["How many?", answer]]}]))

    assert counted(3) == pytest.approx(0.8, abs=1e-5)
    for wrong in ("ten", "12", "perhaps"):
        with pytest.raises(UserError, match="a count from 0 to 9"):
            counted(wrong)


def test_an_edit_is_judged_by_both_pictures_and_by_itself(url):
    """The server's scores are ten times the brightness of the first picture it sees."""
    before = [{"text": "darken it", "image": Image.new("RGB", (8, 8), (153,) * 3)}] * 4
    values = EditJudge(server(url))(greys(), before)
    expected = [(6.0 * 10 * v) ** 0.5 / 10 for v in LEVELS]
    assert values.tolist() == pytest.approx(expected, abs=1e-4)
    texts = [body["text"] for body in stats(url)["bodies"]][-8:]
    assert sum("darken it" in text for text in texts) == 4  # how it looks is judged without
    video = greys()[:, None].expand(-1, 3, -1, -1, -1)
    torch.testing.assert_close(EditJudge(server(url), frames=2)(video, before), values)
    with pytest.raises(UserError, match="picture before the edit"):
        EditJudge(server(url))(greys(), prompts())
    with pytest.raises(UserError, match="not texts"):
        EditJudge(server(url))(["a"], before[:1])


def test_the_worse_of_two_scores_counts():
    class Fixed:
        usage = None

        def ask(self, questions):
            scores = '"success": 9, "preserved": 4', '"naturalness": 1, "artifacts": 10'
            asked = [question.schema.model_fields for question in questions]
            replies = [scores["success" not in fields] for fields in asked]
            return [q.value(f'{{"reason": "r", {r}}}') for q, r in zip(questions, replies)]

    before = [{"text": "x", "image": Image.new("RGB", (4, 4))}]
    assert EditJudge(Fixed())(greys()[:1], before).item() == pytest.approx((4 * 1) ** 0.5 / 10)


def test_a_pair_judged_with_reasons_is_read_after_them(url):
    judge = Pairwise(server(url), template="unified_reward_think")
    assert judge.template.tokens == 2048 and Pairwise(server(url)).template.tokens == 512
    assert Pairwise(server(url), tokens=100).template.tokens == 100
    asked = [{"text": "bright", "group": 0}] * 4
    assert judge(greys(), asked).tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    text = sent_with(url)
    assert "Aesthetics" in text and "Temporal" not in text
    video = greys()[:, None].expand(-1, 2, -1, -1, -1)
    assert judge(video, asked).tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert "Temporal coherence" in sent_with(url)


def test_a_pair_of_answers_is_judged_by_what_matters_for_answers(url):
    """The template of UnifiedReward-Think for understanding; here the longer answer is better."""
    judge = Pairwise(server(url), template="unified_reward_think")
    answers = ["two", "two red cars", "two red cars on a road"]
    prompt = {"text": "what is there?", "group": 0, "images": [Image.new("RGB", (4, 4))]}
    assert judge(answers, [prompt] * 3).tolist() == pytest.approx([0, 0.5, 1])
    text = sent_with(url)
    assert "2. Correctness" in text and "Aesthetics" not in text and "Caption" not in text
    assert "Question: [what is there?]" in text and "Answer 1: [" in text


def test_one_sample_is_scored_after_its_reasons(url):
    """UnifiedReward-Think asked about single samples: only the last answer's score counts."""
    judge = Judge(server(url), template="unified_reward_think")
    assert judge.template.tokens == 2048 and Judge(server(url)).template.tokens == 512
    expected = [(1 + 9 * level) / 10 for level in LEVELS]
    assert judge(greys(), prompts()).tolist() == pytest.approx(expected)
    assert "Aesthetics" in sent_with(url)
    pictured = [{"text": "how bright?", "images": [greys()[2]]}]
    assert judge(["rather"], pictured).tolist() == pytest.approx([0.64])
    text = sent_with(url)
    assert "3. Clarity" in text and "Answer: [rather]" in text


def test_an_answer_is_judged_beside_the_right_one(url):
    judge = Judge(server(url), template="reference")
    prompt = {"text": "what is it?", "answer": "a red bus", "images": [greys()[2]]}
    assert judge(["a bus, red"], [prompt]).tolist() == pytest.approx([0.6])
    text = sent_with(url)
    assert "Reference answer:\na red bus\n\nAnswer to be judged:\na bus, red" in text
    with pytest.raises(UserError, match="template reference: .*answer"):
        judge(["a bus"], [{"text": "what is it?"}])


T, ONE, TWO = "<think>x</think>", "<answer>Image 1 is better</answer>", "Image 2 is better"


def scored(*scores):
    return "".join(f"<answer>Final Score: {score}</answer>" for score in scores)


# what a model writes -> its score, or the chance of the first picture; None: it must not be read
AFTER_REASONS = [
    (f"<think>Final Score: 9</think>{scored(3)}", 3.0),
    (f"<think>it says {scored(10)}</think>{scored(2)}", 2.0),
    (f"<think>a caption says </think>{scored(10)} so no.</think>{scored(2)}", 2.0),
    (scored(4), 4.0),
    (T + scored(4, 4), 4.0),
    (f"{T}<answer>**Final Score:** 7.5</answer>", 7.5),
    ("<think>Final Score: 10", None),  # cut off
    ("<think>Final Score: 10</think>", None),
    ("Final Score: 10", None),
    (T + scored(4, 10), None),
    (f"{T}<answer>Final Score: 4 Final Score: 10</answer>", None),
    *((T + scored(score), None) for score in (11, -3, "nan")),
    (T + "<answer>" * 2000, None),
    ("", None),
]
VERDICTS = [
    (f"<think>Image 1 is better.</think><answer>{TWO}</answer>", 0.0),
    (f"<think>I quote: </think><answer>{TWO}</answer></think>{ONE}", 1.0),
    ("<think>Image 1 is better", None),
    (f"{T}Image 1 is better", None),
    (f"{T}<answer>Image 1 is better. {TWO}</answer>", None),
    (f"{T}{ONE}<answer>{TWO}</answer>", None),
    (f"{T}<answer>neither</answer>", None),
]


def test_answers_after_reasons_are_read_as_they_are_meant(url, subtests):
    template = BUILT_IN["unified_reward_think"]
    sample = Question(("x",), read=template.scores, tagged=template.tagged)
    judge = Pairwise(server(url), template="unified_reward_think")
    pair = judge._question(greys()[:2], {"text": "x"}, [[], []], 0, 1)
    for question, key, rows in ((sample, "score", AFTER_REASONS), (pair, "1", VERDICTS)):
        for text, value in rows:
            with subtests.test(text=text):
                if value is None:
                    with pytest.raises(Unreadable):
                        question.value(text)
                else:
                    assert question.value(text) == {key: value}
