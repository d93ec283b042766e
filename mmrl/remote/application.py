"""Makes an ASGI application of a service: the path that it answers, ``/health``, ``/info`` and
``/metrics``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from mmrl.remote.requests import Doorkeeper, Refusal, reply


def application(service: Doorkeeper, title: str, path: str) -> FastAPI:
    """Return the application that answers ``POST path`` by this service, which ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.close)

    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.service = service

    @app.post(path)
    async def answer(request: Request) -> Response:
        return await service.respond(request)

    @app.get("/health")
    async def health() -> Response:
        problem = service.problem()
        return reply({"status": problem or "ok"}, 503 if problem else 200)

    @app.get("/info")
    async def info(request: Request) -> Response:
        service.authenticate(request)
        return reply(service.info())

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        service.authenticate(request)
        text = "\n".join(service.metrics()) + "\n"
        return Response(text, media_type="text/plain; version=0.0.4")

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return error.reply()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        return Refusal(error.status_code, str(error.detail), headers=error.headers).reply()

    return app
