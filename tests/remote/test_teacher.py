"""Teachers on other machines: the same loss to the bit, refusals before training, hostile bytes."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial

import httpx
import pytest
import torch
import yaml

from mmrl.apps.serve.server import load_teacher
from mmrl.apps.serve.teaching import make_teacher_app
from mmrl.core import top_tokens
from mmrl.core.distributions import Categorical
from mmrl.core.divergences import Divergence
from mmrl.core.errors import UserError
from mmrl.core.messages import BadMessage, pack, unpack
from mmrl.policies import teaching as wire
from mmrl.zoo.objectives.distillation import Distill, Teacher
from mmrl.zoo.objectives.teacher_options import RemoteOptions
from tests.core.test_contract import made
from tests.fixtures import toys, waiting
from tests.fixtures.reward_servers import answering, free_port, saying
from tests.fixtures.teachers import teaching
from tests.objectives.test_distillation import gradients, moved, points_of, written
from tests.policies.test_contract_policies import prompts_for

QUICK = {"retries": 2, "backoff": 0.01, "timeout": 20.0, "retry_seconds": 0.0}


def remote(url, **options):
    return Teacher(remote=RemoteOptions(url, **QUICK | options))


def by_both(policy, teacher, prompts, kind="reverse", limits=None, **options):
    """(loss, gradient) of the teacher called here, and of the same asked over HTTP."""
    local = Distill([Teacher(lambda: teacher)], divergence=Divergence(kind))
    points = points_of(policy, local, prompts)
    here = gradients(policy, local, points)
    with teaching(teacher, **limits or {}) as url:
        there = Distill([remote(url, **options)], divergence=Divergence(kind))
        there.setup(policy)
        return here, gradients(policy, there, points)


# one of each kind of distribution
MAKERS = {
    "flow": partial(toys.make, "flow", guidance_scale=2.5),
    **{name: partial(made, "policies", name) for name in ("vlm", "amused", "janus_unified")},
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_teacher_elsewhere_says_the_same_to_the_bit(name):
    policy = MAKERS[name]()
    teacher = moved(MAKERS[name]())
    kind = "jensen_shannon" if name in ("vlm", "flow") else "reverse"
    prompts = toys.prompts(2) if name == "flow" else prompts_for(policy)[:2]
    here, there = by_both(policy, teacher, prompts, kind)
    assert here[0] > 1e-4 and there[0] == here[0] and torch.equal(there[1], here[1])


@pytest.mark.parametrize("family", ["flow", "causal"])
def test_questions_of_fewer_rows_and_halved_answers_change_little(family):
    policy, teacher = toys.make(family), moved(toys.make(family))
    here, there = by_both(policy, teacher, toys.prompts(3), max_rows=2)
    assert there[0] == pytest.approx(here[0], rel=1e-5)
    torch.testing.assert_close(there[1], here[1], rtol=1e-4, atol=1e-6)
    here, there = by_both(policy, teacher, toys.prompts(3), precision="bfloat16")
    assert there[0] == pytest.approx(here[0], rel=0.1) and there[0] != here[0]


def test_the_likeliest_tokens_bound_the_divergence_from_below():
    """All of them are the whole, to the bit; fewer are less."""
    policy, teacher = toys.make("causal"), moved(toys.make("causal"))
    here, there = by_both(policy, teacher, toys.prompts(2), top_k=10**6)
    assert there[0] == here[0] and torch.equal(there[1], here[1])
    here, bound = by_both(policy, teacher, toys.prompts(2), top_k=2, max_rows=1)
    assert 0 < bound[0] < here[0] and bound[1].isfinite().all() and bound[1].abs().max() > 0


@pytest.mark.parametrize("kind", ["reverse", "forward", "jensen_shannon"])
def test_categories_are_compared_as_a_loop_does(kind):
    """In value and in gradient; also where the student never writes a token, and where the
    teacher has tokens that it has not."""
    logits = torch.randn(3, 7, dtype=torch.float64).requires_grad_()
    logits.data[0, 2:] = -torch.inf  # of these no more than two are likeliest
    theirs = torch.randn(3, 9, dtype=torch.float64)
    theirs[0, :2] += 10
    by = Divergence(kind)
    short = top_tokens.shortened({"logits": theirs}, 2, {"logits": 7})
    assert sum(x.numel() for x in short.values()) == 3 * (2 + 2 + 1) + 1
    whole = top_tokens.completed(short, {"logits": logits.detach()})["logits"]
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(3).double())
    torch.testing.assert_close(whole[0, :2], theirs[0, :7].log_softmax(-1)[:2])
    values = Categorical(logits[1:]).kl(Categorical(whole[1:]), by)
    expected = []
    for p, q in zip(logits[1:].softmax(-1), theirs[1:, :7].softmax(-1)):
        top = q.argsort(descending=True)[:2]
        cells = [torch.cat([x[top], 1 - x[top].sum()[None]]) for x in (p, q)]
        expected.append(Categorical(cells[0].log()).kl(Categorical(cells[1].log()), by))
    expected = torch.stack(expected)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)
    assert (values < Categorical(logits[1:]).kl(Categorical(theirs[1:, :7]), by)).all()
    gradients = [
        torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (values, expected)
    ]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="likeliest tokens"):
        top_tokens.completed(short | {"logits.ids": short["logits.ids"] + 7}, {"logits": logits})


def test_likeliest_tokens_are_refused_where_there_are_none():
    with teaching(toys.make("flow")) as url:
        says = r"teachers\[0\].remote.top_k: it is for policies whose decisions are tokens"
        with pytest.raises(UserError, match=says):
            Distill([remote(url, top_k=4)]).setup(toys.make("flow"))
    causal = toys.make("causal")
    objective = Distill([Teacher(lambda: causal)])
    (point,) = points_of(causal, objective, toys.prompts(2))[:1]
    asked = wire.question(point, causal.dist(point))
    for wrong in (0, True, "3", None):
        with pytest.raises(wire.BadQuestion, match="top_k: expected a number above 0"):
            wire.answer(causal, asked | {"top_k": wrong, "widths": {"logits": 5}})
    with pytest.raises(wire.BadQuestion, match="widths: expected those of"):
        wire.answer(causal, asked | {"top_k": 2, "widths": {}})


def test_another_vocabulary_or_latent_space_is_refused_at_the_first_word():
    student = made("policies", "vlm")
    mine = wire.signature(student)
    assert json.loads(json.dumps(mine)) == mine and not list(wire.misfits(student, mine))
    (why,) = wire.misfits(student, mine | {"vocabulary": "9 tokens, 00"})
    assert "its vocabulary is 9 tokens, 00, the policy's " in why
    flow = made("policies", "sd")
    mine = wire.signature(flow)
    (why,) = wire.misfits(flow, mine | {"latents": mine["latents"] | {"scaling_factor": 0.1}})
    assert "its latent space is" in why and "'autoencoder': 'AutoencoderKL'" in why
    says = r"teachers\[0\].remote: ToyFlow makes other decisions"
    with teaching(toys.make("flow")) as url, pytest.raises(UserError, match=says):
        Distill([remote(url)]).setup(toys.make("causal"))


def test_a_token_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("secret\n")
    policy = toys.make("causal")
    with teaching(toys.make("causal"), token="secret") as url:
        with pytest.raises(UserError, match="refused the token; set MMRL_TEACHER_TOKEN"):
            Distill([remote(url)]).setup(policy)
        Distill([remote(url, token_file=tmp_path / "token")]).setup(policy)
        monkeypatch.setenv("MMRL_TEACHER_TOKEN", "secret")
        Distill([remote(url)]).setup(policy)
        assert waiting.post(f"{url}/teach", content=b"").status_code == 401
        assert waiting.get(f"{url}/health").json() == {"status": "ok"}


def test_who_does_not_answer_is_named_in_a_sentence():
    policy = toys.make("causal")
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"no teacher answers .{dead}: Connect.*train --resume"):
        Distill([remote(dead, retries=1)]).setup(policy)
    another = saying("200 OK", '{"rewards": {}}')
    says = "serves no teacher; start it with `mmrl serve-teacher"
    with answering(another) as url, pytest.raises(UserError, match=says):
        Distill([remote(url)]).setup(policy)
    with answering(saying("200 OK", '{"teacher": {}}')) as liar, teaching(policy) as url:
        objective = Distill([remote(url)])
        points = points_of(policy, objective, toys.prompts(2))
        # one that says nonsense, and one that is not there: the third answers
        client = objective.loaded[0]
        client.servers = type(client.servers)([liar, dead, url], kind="teacher")
        assert objective.loss(policy, points[0]).isfinite().all()
        client.servers = type(client.servers)([liar], kind="teacher")
        with pytest.raises(UserError, match="no teacher answers .*an answer that is no safetensor"):
            objective.loss(policy, points[0])


def test_too_long_questions_and_answers_are_refused():
    policy = toys.make("causal")
    for limits, says in (
        ({"max_request_mib": 1e-3}, "question or its answer too large; lower max_rows"),
        ({"max_answer_mib": 1e-5}, "more than max_answer_mib 1e-05; ask for fewer rows"),
    ):
        with pytest.raises(UserError, match=says):
            by_both(policy, toys.make("causal"), toys.prompts(2), limits=limits)
    with pytest.raises(UserError, match="an answer of more than 10 bytes"):
        by_both(policy, toys.make("causal"), toys.prompts(2), max_answer_mib=1e-5, retries=0)


def test_nests_come_back_as_they_went_and_deep_ones_are_refused():
    nest = {"a": [torch.arange(3), (None, True, 1.5)], "b": {"": torch.zeros(0, 2), "c": "é"}}
    again = unpack(pack(nest))
    assert torch.equal(again["a"][0], nest["a"][0]) and again["a"][1] == nest["a"][1]
    assert again["b"][""].shape == (0, 2) and again["b"]["c"] == "é"
    with pytest.raises(TypeError, match="PosixPath|object"):
        pack({"x": object()})
    deep = None
    for _ in range(40):
        deep = {"a": deep}
    with pytest.raises(BadMessage, match="nested more than 16"):
        unpack(pack(deep))
    with pytest.raises(BadMessage, match="too long a header"):
        unpack((2**40).to_bytes(8, "little") + b"{}")


def question_of(policy):
    objective = Distill([Teacher(lambda: policy)])
    (point, *_) = points_of(policy, objective, toys.prompts(2))
    return wire.question(point, policy.dist(point))


def spoilt(nest, draw):
    """The same nest with a leaf changed, left out or put elsewhere."""
    if not nest:
        return nest
    key = draw.choice(list(nest) if isinstance(nest, dict) else range(len(nest)))
    inner = nest[key]
    if isinstance(inner, (dict, list)) and draw.random() < 0.7:
        inner = spoilt(inner, draw)
    else:
        inner = draw.choice([None, [], {}, "x", -1, 1e9, True, torch.zeros(0), torch.ones(3, 2)])
    changed = dict(nest) if isinstance(nest, dict) else list(nest)
    changed[key] = inner
    if draw.random() < 0.2:
        del changed[key]
    return changed


def asked(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://teacher")


def test_no_message_that_anyone_may_send_is_a_500():
    draw = random.Random(0)
    sent = 100

    async def ask(app, contents):
        async with asked(app) as client:
            codes = [(await client.post("/teach", content=c)).status_code for c in contents]
            counted = (await client.get("/metrics")).text
        good = codes.count(200)
        assert f'mmrl_teacher_requests_total{{status="200"}} {good}\n' in counted
        return codes

    for family in ("flow", "causal"):
        policy = toys.make(family)
        good = question_of(policy)
        bodies = [pack(spoilt(good, draw)) for _ in range(sent)]
        for body in list(bodies):
            place = draw.randrange(len(body))
            bodies.append(body[:place] + bytes([draw.randrange(256)]) + body[place + 1 :])
        bodies += [b"", b"\xff" * 8, b"\0" * 8, pack({}), pack([good]), pack(good)[:-1]]
        codes = asyncio.run(ask(make_teacher_app(policy), [*bodies, pack(good)]))
        assert codes[-1] == 200 and 500 not in codes and set(codes) <= {200, 400, 413, 422}
        assert codes.count(400) > sent / 4


def test_a_run_learns_from_a_served_configuration(tmp_path, monkeypatch):
    from mmrl.experiment.lifecycle import train

    file = tmp_path / "teacher.yaml"
    toy = "tests.fixtures.toys:ToyCausal"
    file.write_text(yaml.safe_dump({"policy": toy, "serve": {"port": 0}, "train": {}}))
    policy, options = load_teacher(file, ["serve.max_waiting=3"])
    assert options.max_waiting == 3 and options.port == 0
    with pytest.raises(UserError, match="set a token in the environment variable MMRL_TEACHER_TOK"):
        load_teacher(file, ["serve.host=0.0.0.0"])
    (tmp_path / "none.yaml").write_text("train: {}\n")
    with pytest.raises(UserError, match="the section 'policy' is missing"):
        load_teacher(tmp_path / "none.yaml")
    with teaching(moved(policy, 0.5)) as url:
        objective = {"distill": {"teachers": [{"remote": {"url": url}}]}}
        config = written(tmp_path, objective=objective)
        train(config, [f"run={tmp_path / 'run'}", "train.iterations=2"])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in lines]
    distances = [row["distillation"] for row in logged if "distillation" in row]
    assert len(distances) == 2 and distances[1] < distances[0]
