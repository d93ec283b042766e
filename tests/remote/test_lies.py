"""A server that lies is caught in one sentence; tokens that change, https, and clients that are not
kept waiting or filled."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mmrl.apps.serve.service import ServeOptions
from mmrl.core.errors import UserError
from rewards import Remote
from rewards.servers.tokens import Tokens
from tests.fixtures.reward_servers import (
    answering,
    eighth,
    mean,
    numbers,
    read_all,
    saying,
    send_ok,
    serving,
    spoiling,
    trickling,
)
from tests.fixtures.tiny_rewards import asked, pictures


def values(*numbers):
    return lambda a: a | {"rewards": {"r": list(numbers)}}


def raw(r, weights='{"r": 1}'):
    """A server's answer in its own words."""
    return f'{{"rewards": {r}, "weights": {weights}}}'


OTHER = {"rewards": {"q" * 999: [1.0] * 3}, "weights": {"q" * 999: 1}}
LIES = [
    (values(1.0, 1.0), "expected 3 values"),
    (values(1.0, 1.0, 1.0, 1.0), "expected 3 values"),
    (values(float("nan"), 1.0, 1.0), "NaN is not a JSON number"),
    (values(1.0, 1e39, 1.0), "infinity is not a reward"),
    (values(1.0, -3e7, 1.0), "3e+07 is more than `largest`"),
    (lambda a: a | OTHER, "asked for ['r'], answered"),
    (lambda a: a | {"weights": {}}, "not an answer of a reward server"),
    (lambda a: a | {"ids": a["ids"][::-1]}, "in another order"),
    (lambda a: a | {"ids": a["ids"][:1] * 3}, "other samples than were sent"),
    (lambda a: a | {"ids": ["x", "y", "z"]}, "other samples than were sent"),
    (lambda a: a | {"ids": {"a": 1}}, "no list of texts"),
    (lambda a: a | {"ids": None}, "another version's server"),
]
MALFORMED = ["hello", "[1, 2]", "[" * 100_000, " " * 2_000_000, raw("{}")]
MALFORMED += [
    raw('{"r": [1.0, "2", 3]}'),
    raw('{"r": [1.0, true, 3]}'),
    raw('{"r": [1, 1e999, 3]}'),
]


def changing(change):
    """Values of the answer as ``change`` makes them, ids as they were sent."""
    return spoiling(lambda a: a | {"rewards": {"r": change(a["rewards"]["r"])}})


def test_values_that_are_other_samples_are_caught_by_asking_again(caplog):
    with answering(changing(lambda values: values[::-1])) as liar:
        assert Remote(liar, retry_seconds=0, name="r")(pictures(3), asked(3)).tolist() == [3, 2, 1]
        remote = Remote(liar, retry_seconds=0, name="r", retries=0, recheck=1.0)
        assert remote(pictures(3), asked(3)).isnan().all()
        assert "mixes samples up" in remote.servers[0].cause and not remote.servers[0].outstanding
    assert caplog.text.count("mixes samples up") == 1


def test_a_reward_that_draws_lots_is_said_and_used(caplog):
    # like the test servers, the second answer is right for samples in their first order
    numbers = iter(range(100))
    with answering(changing(lambda values: [v + next(numbers) for v in values])) as lots:
        remote = Remote(lots, name="r", recheck=1.0)
        for _ in range(2):
            assert remote(pictures(3), asked(3)).isfinite().all()
    assert caplog.text.count("it is random") == 1


def test_asking_again_finds_nothing_in_an_honest_server(caplog):
    with serving({"r": mean}) as honest:
        remote = Remote(honest, name="r", recheck=1.0, batch_size=2)
        once = Remote(honest, name="r")(pictures(5), asked(5))
        assert remote(pictures(5), asked(5)).equal(once)
        assert remote.servers[0].requests == 3
    assert not caplog.text


def test_a_lie_is_named_and_gives_no_value(caplog, subtests):
    lies = [(spoiling(change), says) for change, says in LIES]
    lies += [(saying("200 OK", text), "") for text in MALFORMED]
    for number, (reply, says) in enumerate(lies):
        caplog.clear()
        with subtests.test(number=number, says=says), answering(reply) as liar:
            remote = Remote(liar, retry_seconds=0, name="r", retries=0)
            assert remote(pictures(3), asked(3)).isnan().all()
            assert says in remote.servers[0].cause and len(remote.servers[0].cause) < 200
            assert caplog.text.count(liar) == 1 and "Traceback" not in caplog.text


def test_an_answer_of_before_is_noticed():
    answers = []

    def replay(answer):
        answers.append(answer)
        return answers[0]

    with answering(spoiling(replay)) as liar:
        remote = Remote(liar, retry_seconds=0, name="r", retries=0)
        assert remote(pictures(2), asked(2)).tolist() == [1, 2]
        assert remote(pictures(2), asked(2)).isnan().all()
        assert "an earlier request's" in remote.servers[0].cause


def test_a_weighted_sum_is_bounded_too():
    with answering(spoiling(lambda a: a | {"weights": {"r": 1e30}})) as liar:
        remote = Remote(liar, retry_seconds=0, retries=0)
        assert remote(pictures(2), asked(2)).isnan().all()
        assert "`largest`" in remote.servers[0].cause
    with serving({"numbers": numbers}) as address:
        large = Remote(address, retry_seconds=0, largest=1e7)
        assert large(pictures(2), [{"n": 2_000_000}, {"n": 1}]).tolist() == [2_000_000, 1]


def test_a_compressed_answer_is_neither_asked_for_nor_opened():
    heads = []
    bomb = gzip.compress(gzip.compress(bytes(2**26)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for coding in (b"gzip, gzip", b"br", b"x" * 300):

        def reply(connection, head=b"Content-Encoding: " + coding + b"\r\n"):
            heads.append(read_all(connection)[0])
            send_ok(connection, bomb, head)

        with answering(reply) as liar:
            remote = Remote(liar, retry_seconds=0, retries=0)
            assert remote(pictures(1), asked(1)).isnan().all()
            assert "which was not asked for" in remote.servers[0].cause
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB
    assert {head[b"accept-encoding"] for head in heads} == {b"identity"}


@pytest.mark.parametrize(
    ("head", "piece"),
    [(b"HTTP/1.1 200 OK\r\n", b"X"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
    ids=["headers", "one continue after the other"],
)
def test_headers_that_never_end_cost_one_time_out(head, piece):
    with answering(trickling(head, piece)) as liar:
        remote = Remote(liar, retry_seconds=0, timeout=0.2, retries=2)
        assert remote(pictures(1), asked(1)).isnan().all()
        assert "no answer within 0.2 s" in remote.servers[0].cause
        assert remote.servers[0].silent and remote.servers[0].requests == 1


def test_a_token_is_changed_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.delenv("MMRL_REWARD_TOKEN", raising=False)
    file, mine = tmp_path / "tokens", tmp_path / "mine"
    file.write_text("old\n")
    mine.write_text("old")
    with serving({"mean": mean}, token_file=file) as address:
        remote = Remote(address, retry_seconds=0, token_file=mine)

        def good():
            return remote(pictures(2), asked(2)).isfinite().all()

        assert good()
        file.write_text("new\nold\n")  # both are valid for a while
        assert good()
        mine.write_text("new-one")
        with pytest.raises(UserError, match="refused the token"):
            good()
        mine.write_text("new\n")
        assert good()
        file.write_text("new\n")
        with pytest.raises(UserError, match="refused the token"):
            Remote(address, retry_seconds=0, token="old")(pictures(2), asked(2))
        os.unlink(file)  # between two versions of it
        assert good()
        for broken in ("\n\n", "b\u00e4d\n"):
            file.write_text(broken)
            assert good()
    (tmp_path / "empty").write_text("\n")
    for words, says in (
        ((None, tmp_path / "empty"), "has no token"),
        ((None, tmp_path / "none"), "cannot be read"),
        (("a", tmp_path / "empty"), "give one of them"),
    ):
        with pytest.raises(UserError, match=says):
            Tokens(*words)
    assert Tokens().valid() == () and Tokens("a").current() == "a"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for this machine, signed by itself, its key, and another one."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        subprocess.run(
            [
                *"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1".split(),
                *"-nodes -days 2 -subj /CN=localhost".split(),
                *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
                *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")),
            ],
            check=True,
            capture_output=True,
        )
    return folder


def test_https_is_checked_and_scores_the_same(certificate, tmp_path):
    pem, other = certificate / "server.pem", certificate / "other.pem"
    options = {"certificate": pem, "private_key": certificate / "server.key", "token": "s3cret"}
    media = eighth(pictures(4))
    with serving({"mean": mean}, **options) as plain:
        address = plain.replace("http://", "https://")

        def ask(url, certificate, threads=1, **more):
            more |= {"token": "s3cret", "certificate": certificate, "retries": 0}
            remote = Remote(url, retry_seconds=0, **more)
            with ThreadPoolExecutor(threads) as pool:
                values = list(pool.map(lambda _: remote(media, asked(4)), range(threads)))
            return torch.stack(values), remote.servers[0].cause

        values, _ = ask(address, pem, threads=4)
        assert torch.equal(values, mean(media, None).expand(4, -1))
        for wrong in (None, other):
            values, cause = ask(address, wrong)
            assert values.isnan().all() and "CERTIFICATE_VERIFY_FAILED" in cause
        values, _ = ask(plain, None, timeout=0.5)  # the token is not sent in the clear
        assert values.isnan().all()
    with pytest.raises(UserError, match="belong together"):
        ServeOptions(certificate=pem)
    with pytest.raises(UserError, match="cannot be used"):
        ServeOptions(certificate=pem, private_key=certificate / "other.key")
    (tmp_path / "no.pem").write_text("none")
    with pytest.raises(UserError, match="cannot be read"):
        Remote("https://127.0.0.1:1", certificate=tmp_path / "no.pem")
