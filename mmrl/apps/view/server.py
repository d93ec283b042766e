"""Builds the web application of the live view.

It only reads run folders. Every request must name a host that cannot belong to another site
(against DNS rebinding), pages may only load from and contact this server, and without ratings only
GET is allowed. Ratings need a token from the page (against CSRF).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response
from PIL import Image

from mmrl.apps.view import pages
from mmrl.apps.view.folders import RunFolder, Runs
from mmrl.apps.view.pairs import REWARDS, Pair, Pairs
from mmrl.core.errors import UserError
from mmrl.monitoring.report.pictures import Tile, encoded, open_picture, still

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' data:; media-src 'self'; "
    "style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
STATIC = {
    "report.css": "text/css",
    "view.css": "text/css",
    "report.js": "text/javascript",
    "view.js": "text/javascript",
    "rate.js": "text/javascript",
}
FOREVER = {"Cache-Control": "private, max-age=31536000, immutable"}
MOST_BODY = 4096  # bytes of a rating
PART = re.compile(r"bytes=(\d{1,18})-(\d{0,18})")  # of a file
Next = Callable[[Request], Awaitable[Response]]


def application(runs: Runs, pairs: Pairs | None = None, names: Sequence[str] = ()) -> FastAPI:
    """Build the application. ``names``: further allowed host names."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    allowed = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    @app.middleware("http")
    async def guard(request: Request, call_next: Next) -> Response:
        if not is_safe_host(request.headers.get("host", ""), allowed):
            response: Response = Response("this name is not the server's", 421)
        elif request.method not in ("GET", "HEAD") and pairs is None:
            response = Response("read-only", 405)
        else:
            response = await call_next(request)
        for name, value in HEADERS.items():
            response.headers[name] = value
        response.headers.setdefault("Cache-Control", "no-cache")
        return response

    @app.exception_handler(UserError)
    @app.exception_handler(OSError)
    @app.exception_handler(Image.DecompressionBombError)
    def unreadable(request: Request, error: Exception) -> Response:
        return Response(str(error), 404)  # a deleted run, a broken picture

    _add_pages(app, runs, pairs is not None)
    _add_pictures(app, runs)
    if pairs is not None:
        token = secrets.token_urlsafe(32)
        _add_pairs(app, pairs, token)
        _add_ratings(app, pairs, token)
    return app


def is_safe_host(header: str, allowed: set[str]) -> bool:
    """Tell whether a Host header is an IP address or a known name: a site that points its own name
    here (DNS rebinding) can only send that name."""
    host = header.lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    else:
        host = host.partition(":")[0]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".") in allowed
    return True


def _add_pages(app: FastAPI, runs: Runs, rating: bool) -> None:
    @app.get("/")
    def overview(request: Request) -> Response:
        folders = runs.look()
        if len(folders) == 1 and runs.places == [folders[0].folder]:
            return RedirectResponse(folders[0].address)
        stamp = _stamp([folder.stamp() for folder in folders])
        return _page(request, stamp, lambda: pages.overview(folders, rating))

    @app.get("/runs/{key}")
    def run_page(request: Request, key: str, answers: int | None = None) -> Response:
        folder = runs.find(key)
        if folder is None:
            return _missing()
        return _page(
            request,
            _stamp([folder.stamp()], answers),
            lambda: pages.run_page(folder, answers, rating),
        )

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in STATIC:
            return _missing()
        source, _, _ = pages.environment().loader.get_source(pages.environment(), name)
        return Response(source, media_type=STATIC[name])


def _add_pictures(app: FastAPI, runs: Runs) -> None:
    @app.get("/runs/{key}/sheets/{name}")
    def sheet(request: Request, key: str, name: str) -> Response:
        folder = runs.find(key)
        path = folder.sheet(name) if folder else None
        if path is None:
            return _missing()
        if path.suffix == ".mp4":
            return FileResponse(path, headers=FOREVER)
        return _media(request, *encoded(still(open_picture(path))), FOREVER)

    @app.get("/runs/{key}/sheets/{name}/{index}")
    def tile(request: Request, key: str, name: str, index: int) -> Response:
        folder = runs.find(key)
        path = folder.sheet(name) if folder else None
        if folder is None or path is None:
            return _missing()
        cut = _cut(folder, name, path.stat().st_mtime_ns)
        if not 0 <= index < len(cut):
            return _missing()
        # earlier versions wrote sheets of videos as animated PNG: use a still picture
        content, ending = encoded(cut[index] if path.suffix == ".mp4" else still(cut[index]))
        return _media(request, content, ending, FOREVER)


def _add_pairs(app: FastAPI, pairs: Pairs, token: str) -> None:
    @app.get("/rate")
    def page() -> Response:
        text = pages.environment().get_template("rate.html").render(token=token, file=pairs.file)
        return HTMLResponse(text)

    @app.get("/rate/pair")
    def pair() -> Response:
        chosen = pairs.next()
        counts = {"rated": len(pairs.rated), "total": pairs.total()}
        return JSONResponse({"pair": _shown(chosen) if chosen else None, **counts})

    @app.get("/rate/pairs/{number}/{side}")
    def picture(request: Request, number: str, side: str) -> Response:
        chosen = pairs.pending.get(number)
        if chosen is None or side not in ("left", "right"):
            return _missing()
        content = chosen.contents[side == "right"]
        if isinstance(content, str):
            return _missing()
        return _media(request, content.encoded, content.ending, {"Cache-Control": "no-store"})


def _add_ratings(app: FastAPI, pairs: Pairs, token: str) -> None:
    @app.post("/rate/pairs/{number}/{choice}")
    async def rate(request: Request, number: str, choice: str) -> Response:
        if problem := _forged(request, token):
            return problem
        if choice not in REWARDS:
            return JSONResponse({"error": "choose 1, 2 or 0"}, 422)
        try:
            accepted = pairs.rate(number, choice)
        except OSError as error:
            return JSONResponse({"error": f"{pairs.file} cannot be written: {error}"}, 507)
        if not accepted:
            return JSONResponse({"error": "this pair is not waiting for a rating"}, 409)
        return JSONResponse({"rated": len(pairs.rated)})

    @app.post("/rate/undo")
    async def undo(request: Request) -> Response:
        if problem := _forged(request, token):
            return problem
        return JSONResponse({"undone": pairs.undo(), "rated": len(pairs.rated)})


def _forged(request: Request, token: str) -> Response | None:
    """Refuse a request that did not come from the page: no token, or another origin."""
    origin = request.headers.get("origin")
    same = origin is None or origin.partition("://")[2] == request.headers.get("host")
    # as bytes: non-ASCII text cannot be compared
    sent = request.headers.get("x-token", "").encode()
    if not same or not hmac.compare_digest(sent, token.encode()):
        return JSONResponse({"error": "reload the page: its token is not this server's"}, 403)
    return None


def _shown(pair: Pair) -> dict[str, Any]:
    """Return what the browser gets of a pair, without its sources."""
    sides = [
        {"text": content}
        if isinstance(content, str)
        else {
            "picture": f"/rate/pairs/{pair.number}/{side}",
            "film": content.ending == ".mp4",
        }
        for side, content in zip(("left", "right"), pair.contents, strict=True)
    ]
    question = pair.samples[0].picture
    return {
        "number": pair.number,
        "prompt": pair.samples[0].prompt,
        "picture": question if question.startswith("data:image/") else "",
        "sides": sides,
    }


def _page(request: Request, stamp: str, render: Callable[[], str]) -> Response:
    """Answer with a page, or with 304 if nothing in the run folders has changed."""
    headers = {"ETag": f'"{stamp}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(render(), headers=headers)


def _stamp(stamps: Sequence[str], choice: object = None) -> str:
    return hashlib.sha256(repr((stamps, choice)).encode()).hexdigest()[:24]


def _missing() -> Response:
    return Response("not found", 404)


@lru_cache(maxsize=8)
def _cut_sheet(folder: Path, name: str, changed: int) -> list[Tile]:
    from mmrl.monitoring.report.runs import read_run

    return read_run(folder, jsonl=False).sample_tiles(name)


def _cut(folder: RunFolder, name: str, changed: int) -> list[Tile]:
    return _cut_sheet(folder.folder, name, changed)


def _media(request: Request, content: bytes, ending: str, headers: dict[str, str]) -> Response:
    """Answer with a picture or a film, or the requested range: Safari requires range requests for
    films."""
    kind = "video/mp4" if ending == ".mp4" else "image/png"
    headers = headers | {"Accept-Ranges": "bytes"}
    part = PART.fullmatch(request.headers.get("range", ""))
    if part is None:
        return Response(content, media_type=kind, headers=headers)
    first = int(part[1])
    last = min(int(part[2] or len(content) - 1), len(content) - 1)
    if first > last:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
    return Response(content[first : last + 1], 206, media_type=kind, headers=headers)
