"""An OpenAI-compatible server that looks at the brightness of pictures, in a process of its own,
and fails on demand.

Run as a program it serves until it is ended: ``python tests/fake_chat.py [--key KEY] [--bias 0.2]
[--model NAME ...]``. A text that holds ``fault:NAME:N`` gets the fault NAME for its first N
requests. ``GET /stats`` says what came in.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STATUS = {"429": 429, "500": 500, "503": 503, "refuse": 400}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    key = None
    bias = 0.0
    models = ["fake"]
    seen = Counter()
    stats = {"requests": 0, "most_at_once": 0, "bodies": [], "times": []}
    lock = threading.Lock()
    # two: set once two requests have been there at a time
    inside = 0
    two = threading.Event()

    def do_GET(self):
        if self.path == "/stats":
            return self.reply(200, self.stats)
        self.reply(200, {"data": [{"id": name} for name in self.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            Handler.inside += 1
            self.stats["requests"] += 1
            self.stats["times"].append(time.monotonic())
            self.stats["bodies"].append(
                {k: v for k, v in body.items() if k != "messages"} | {"text": texts(body)}
            )
            self.stats["most_at_once"] = max(self.stats["most_at_once"], self.inside)
            if self.inside >= 2:
                self.two.set()
        try:
            self.answer(body)
        finally:
            with self.lock:
                Handler.inside -= 1

    def answer(self, body):
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            return self.reply(
                401, {"error": {"message": f"wrong key: {self.headers.get('Authorization')}"}}
            )
        text = texts(body)
        fault = self.fault(text)
        if fault == "slow":
            threading.Event().wait(600)  # longer than anybody waits for it
        if fault == "meet" and not self.two.wait(60):
            return self.reply(500, {"error": {"message": "nobody came"}})
        if fault == "drop":
            self.close_connection = True
            return self.connection.close()
        if fault == "half":
            self.close_connection = True
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            return self.connection.close()
        if fault in STATUS:
            headers = {"Retry-After": "0.4"} if fault == "429" else {}
            return self.reply(STATUS[fault], {"error": {"message": f"as told: {fault}"}}, headers)
        if fault == "garbage":
            return self.reply(200, ["no", "choices"])
        for name, words in {"noformat": "response_format", "nologprobs": "logprobs"}.items():
            if f"fault:{name}" in text and words in body:
                return self.reply(
                    400, {"error": {"message": f"{words} is not supported by this model"}}
                )
        time.sleep(0.02)
        choice = self.choice(body, fault)
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        self.reply(200, {"choices": [{"index": 0, **choice}], "usage": usage})

    def choice(self, body, fault):
        bright = [brightness(url) for url in urls(body)] or [len(texts(body)) % 10 / 10]
        value = bright[0]
        schema = (body.get("response_format") or {}).get("json_schema", {}).get("schema")
        words = "Yes" if value >= 0.5 else "No"
        odds = {"Yes": 0.9 * value, "yes": 0.1 * value, "No": 1 - value}
        if "Answer with 1 or 2" in texts(body):
            p = min(0.99, max(0.01, 0.5 + (bright[0] - bright[len(bright) // 2]) / 2 + self.bias))
            words = "1" if p >= 0.5 else "2"
            odds = {"1": p, "2": 1 - p}
        elif "equally good" in texts(body):
            gap = bright[0] - bright[len(bright) // 2]
            words = (
                "Both images are equally good."
                if abs(gap) < 1e-3
                else (f"Image {1 if gap > 0 else 2} is better.")
            )
        elif schema or "one JSON object" in texts(body):
            words = json.dumps(
                filled(schema, value)
                if schema
                else {"reason": "seen", "score": round(10 * value, 4)}
            )
        elif "Final Score" in texts(body):
            words = f"I see it.\n**Final Score:** {1 + 4 * value:.4f}"
        elif "Style Score" in texts(body):
            scores = {"Alignment": value, "Coherence": 0.5, "Style": 1 - value}
            words = "\n".join(
                f"{name} Score (1-5): {1 + 4 * one:.4f}" for name, one in scores.items()
            )
        words = {"badjson": words[:-3], "wrong": '{"reason": "x", "score": 99}', "empty": None}.get(
            fault, words
        )
        choice = {"message": {"role": "assistant", "content": words}, "finish_reason": "stop"}
        if body.get("logprobs"):
            top = [{"token": word, "logprob": math.log(max(p, 1e-9))} for word, p in odds.items()]
            chosen = {
                "token": words,
                "logprob": math.log(max(odds.get(words, 1.0), 1e-9)),
                "top_logprobs": top,
            }
            choice["logprobs"] = {"content": [chosen]}
        return choice

    def fault(self, text):
        """The fault of this request, if it is one of the first so many of its text."""
        found = re.search(r"fault:(\w+):(\d+)", text)
        if not found:
            return None
        with self.lock:
            self.seen[text[: text.find("cannot be used")]] += 1
            number = sum(n for name, n in self.seen.items() if found[0] in name)
        return found[1] if number <= int(found[2]) else None

    def reply(self, status, content, headers=()):
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {
            "Content-Length": len(data),
            "Content-Type": "application/json",
            **dict(headers),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def filled(schema, value):
    found = {}
    for i, (name, one) in enumerate(schema["properties"].items()):
        kind = one["type"]
        top = one.get("maximum", 10)
        numbers = {
            "number": round(top * value, 4),
            "integer": round(top * value),
            "boolean": value > i / 10,
        }
        found[name] = numbers.get(kind, "seen")
    return found


def parts(body):
    for message in body["messages"]:
        content = message["content"]
        yield from [{"type": "text", "text": content}] if isinstance(content, str) else content


def texts(body):
    return "\n".join(part["text"] for part in parts(body) if part["type"] == "text")


def urls(body):
    return [part["image_url"]["url"] for part in parts(body) if part["type"] == "image_url"]


def brightness(url):
    from PIL import Image, ImageStat

    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64", kind
    return sum(ImageStat.Stat(Image.open(io.BytesIO(base64.b64decode(data)))).mean) / 3 / 255


# -------------------------------------------------------------------------------------------------
# for the tests


@contextmanager
def fake_chat(*options: str) -> Iterator[str]:
    """The address (with /v1) of a server in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.kill()


def stats(url: str) -> dict:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/stats", timeout=10) as response:
        return json.load(response)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--key")
    parser.add_argument("--bias", type=float, default=0.0)
    parser.add_argument("--model", action="append")
    chosen = parser.parse_args()
    Handler.key = chosen.key
    Handler.bias = chosen.bias
    Handler.models = chosen.model or ["fake"]
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        print(server.server_address[1], flush=True)
        server.serve_forever()
