"""A server that lies is caught in one sentence; tokens that change, https, and clients that are not
kept waiting or filled."""

from __future__ import annotations

import gzip
import os
import resource
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmrl.apps.serve.service import ServeOptions
from mmrl.core.errors import UserError
from rewards import Remote
from rewards.servers.tokens import Tokens
from tests.fixtures import waiting
from tests.fixtures.reward_servers import (
    answering,
    good,
    mean,
    numbers,
    replying,
    serving,
    spoiling,
    trickling,
)
from tests.fixtures.tiny_rewards import asked, pictures

LIES = {
    "one less": (lambda a: a | {"rewards": {"r": a["rewards"]["r"][:-1]}}, "expected 3 values"),
    "one more": (lambda a: a | {"rewards": {"r": [*a["rewards"]["r"], 1.0]}}, "expected 3 values"),
    "NaN": (lambda a: a | {"rewards": {"r": [float("nan")] * 3}}, "NaN is not a JSON number"),
    "infinity": (lambda a: a | {"rewards": {"r": [1.0, 1e39, 1.0]}}, "infinity is not a reward"),
    "huge": (lambda a: a | {"rewards": {"r": [1.0, -3e7, 1.0]}}, "3e+07 is more than `largest`"),
    "another reward": (
        lambda a: a | {"rewards": {"q" * 999: [1.0] * 3}, "weights": {"q" * 999: 1}},
        "asked for ['r'], answered",
    ),
    "no weights": (lambda a: a | {"weights": {}}, "not an answer of a reward server"),
    "another order": (lambda a: a | {"ids": a["ids"][::-1]}, "in another order"),
    "an id twice": (lambda a: a | {"ids": a["ids"][:1] * 3}, "other samples than were sent"),
    "wrong ids": (lambda a: a | {"ids": ["x", "y", "z"]}, "other samples than were sent"),
    "odd ids": (lambda a: a | {"ids": {"a": 1}}, "no list of texts"),
    "no ids": (lambda a: a | {"ids": None}, "another version's server"),
}


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


def test_a_lie_is_named_and_gives_no_value(caplog):
    for lie, (change, says) in LIES.items():
        caplog.clear()
        with answering(spoiling(change)) as liar:
            remote = Remote(liar, retry_seconds=0, name="r", retries=0)
            assert remote(pictures(3), asked(3)).isnan().all(), lie
            assert says in remote.servers[0].cause and len(remote.servers[0].cause) < 200, lie
            assert caplog.text.count(says) == 1 and "Traceback" not in caplog.text, lie
    with answering(spoiling(lambda answer: answer)) as honest:
        assert Remote(honest, name="r")(pictures(3), asked(3)).tolist() == [1, 2, 3]


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
        many = [{"n": 2_000_000}, {"n": 1}]
        assert Remote(address)(pictures(2), many).isnan().all()
        assert Remote(address, retry_seconds=0, largest=1e7)(pictures(2), many).tolist() == [
            2_000_000,
            1,
        ]


def test_ids_that_are_none_are_refused(url):
    for ids in ([], ["a"], ["a", "a"], ["a", 1], "ab", {"a": 1}, ["a", "b" * 65], [["a"], ["b"]]):
        answer = waiting.post(f"{url}/score", json=good(2, ids=ids))
        assert answer.status_code == 400 and answer.json()["field"] == "ids", ids
    assert waiting.post(f"{url}/score", json=good(2, ids=["a", "b"])).json()["ids"] == ["a", "b"]


# --------------------------------------------------------------------------------------------------
# what a client reads


@pytest.mark.parametrize("coding", ["gzip, gzip", "br", "x" * 300])
def test_a_compressed_answer_is_not_opened(coding):
    bomb = gzip.compress(gzip.compress(bytes(2**26)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(replying(bomb, b"Content-Encoding: " + coding.encode() + b"\r\n")) as liar:
        remote = Remote(liar, retry_seconds=0, retries=0)
        assert remote(pictures(1), asked(1)).isnan().all()
        assert "which was not asked for" in remote.servers[0].cause
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB


def test_nothing_compressed_is_asked_for():
    heads = []

    def reply(connection):
        heads.append(connection.recv(65536).partition(b"\r\n\r\n")[0].lower())

    with answering(reply) as address:
        Remote(address, retry_seconds=0, retries=0)(pictures(1), asked(1))
    assert b"accept-encoding: identity" in heads[0]


ENDLESS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X"),
    "one continue after the other": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("reply", ENDLESS)
def test_headers_that_never_end_cost_one_time_out(reply):
    with answering(trickling(*ENDLESS[reply])) as liar:
        remote = Remote(liar, retry_seconds=0, timeout=0.4, retries=2)
        assert remote(pictures(1), asked(1)).isnan().all()
        assert "no answer within 0.4 s" in remote.servers[0].cause
        assert remote.servers[0].silent and remote.servers[0].requests == 1


# --------------------------------------------------------------------------------------------------
# tokens


def test_a_token_is_changed_without_a_restart(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("old\n")
    mine = tmp_path / "mine"
    mine.write_text("old")
    with serving({"mean": mean}, token_file=file) as address:
        remote = Remote(address, retry_seconds=0, token_file=mine)
        ask = lambda: remote(pictures(2), asked(2)).isfinite().all()  # noqa: E731
        assert ask()
        file.write_text("new\nold\n")  # both are valid for a while
        assert ask()
        mine.write_text("new-one")
        with pytest.raises(UserError, match="refused the token"):
            ask()
        mine.write_text("new\n")
        assert ask()
        file.write_text("new\n")
        assert ask()
        with pytest.raises(UserError, match="refused the token"):
            Remote(address, retry_seconds=0, token="old")(pictures(2), asked(2))
        os.unlink(file)  # between two versions of it
        assert ask()
        file.write_text("\n\n")
        assert ask()
        file.write_text("b\u00e4d\n")
        assert ask()


def test_a_token_file_must_have_a_token_when_it_is_first_read(tmp_path, monkeypatch):
    monkeypatch.delenv("MMRL_REWARD_TOKEN", raising=False)
    empty = tmp_path / "empty"
    empty.write_text("\n")
    with pytest.raises(UserError, match="has no token"):
        Tokens(None, empty)
    with pytest.raises(UserError, match="cannot be read"):
        Tokens(None, tmp_path / "none")
    with pytest.raises(UserError, match="give one of them"):
        Tokens("a", empty)
    assert Tokens().valid() == () and Tokens("a").current() == "a"


# --------------------------------------------------------------------------------------------------
# https


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


def test_https_is_checked_and_scores_the_same(certificate, caplog):
    options = {
        "certificate": certificate / "server.pem",
        "private_key": certificate / "server.key",
        "token": "s3cret",
    }
    media = (pictures(4) * 255).round() / 255
    with serving({"mean": mean}, **options) as plain:
        address = plain.replace("http://", "https://")
        remote = Remote(
            address, retry_seconds=0, token="s3cret", certificate=certificate / "server.pem"
        )
        with ThreadPoolExecutor(4) as pool:
            for values in pool.map(lambda _: remote(media, asked(4)), range(8)):
                assert values.tolist() == mean(media, None).tolist()
        for wrong in (None, certificate / "other.pem"):
            stranger = Remote(
                address, retry_seconds=0, token="s3cret", certificate=wrong, retries=0
            )
            assert stranger(media, asked(4)).isnan().all()
            assert "CERTIFICATE_VERIFY_FAILED" in stranger.servers[0].cause
        nobody = Remote(
            plain, retry_seconds=0, token="s3cret", retries=0
        )  # the token is not sent in the clear
        assert nobody(media, asked(4)).isnan().all()


def test_certificates_that_are_none_are_refused(certificate, tmp_path):
    pem = certificate / "server.pem"
    with pytest.raises(UserError, match="belong together"):
        ServeOptions(certificate=pem)
    with pytest.raises(UserError, match="cannot be used"):
        ServeOptions(certificate=pem, private_key=certificate / "other.key")
    (tmp_path / "no.pem").write_text("none")
    with pytest.raises(UserError, match="cannot be read"):
        Remote("https://127.0.0.1:1", certificate=tmp_path / "no.pem")
