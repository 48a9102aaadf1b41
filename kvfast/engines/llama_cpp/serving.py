"""Serves a model of llama.cpp by the routes of llama-cpp-python's own server (extra ``serve``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math

import anyio
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from llama_cpp.server import app as server
from llama_cpp.server.settings import ServerSettings
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvfast.engines.llama_cpp.served_llama import Caller, ServedLlama, caller
from kvfast.engines.llama_cpp.serving_figures import Figures


class _OneModel(dict):
    """The name of a model and its Llama, which serves all requests: in the place of llama-cpp-python's ``LlamaProxy``."""

    def __call__(self, name=None):
        return next(iter(self.values()))


def make_app(name: str, llm: ServedLlama, api_key: str | None = None, max_waiting: int = 64) -> _Bounded:
    """The application of a server. A request waits for those before it until a context is free; beyond `max_waiting` that wait, it is
    told to come again. The cache of prompts is closed with the server."""

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        if llm.cache:
            llm.cache.close()

    turns, models = asyncio.Semaphore(len(llm.contexts)), _OneModel({name: llm})
    figures = Figures(llm.cache.stats if llm.cache else None)
    for one in llm.contexts:
        one.model_path = name  # which answers name

    async def in_turn():
        now = caller.get()
        with figures.waiting.track_inprogress():
            await _unless_left(now.request, turns.acquire)
        try:
            with figures.failed.count_exceptions():
                yield models
        finally:
            llm.give_back(now)
            turns.release()
            if now.answer.num_tokens:
                figures.count(now.answer)

    # With a prefix, as settings come from the environment, too, where HOST or API_KEY may be those of another program.
    server.set_server_settings(ServerSettings(_env_prefix="kvfast_llama_cpp_", api_key=api_key, interrupt_requests=False))
    server.get_llama_proxy, server.get_event_publisher = in_turn, _publish
    app = FastAPI(title="kvfast", lifespan=lifespan)
    # Those of OpenAI alone: a token that the vocabulary does not have ends the process where its text is asked for.
    routes = [route for route in server.router.routes if route.path.startswith("/v1/")]
    app.include_router(APIRouter(routes=routes), dependencies=[Depends(_remember)])
    app.dependency_overrides[_get_models] = lambda: models  # the list of models waits for no answer
    app.add_api_route("/health", lambda: {"status": "ok"})
    app.add_api_route("/metrics", lambda: Response(generate_latest(figures.registry), media_type=CONTENT_TYPE_LATEST))
    return _Bounded(app, len(llm.contexts) + max_waiting, figures)


class _Bounded:
    """An application that takes at most `most` requests for answers at a time."""

    def __init__(self, app, most, figures):
        self._app, self._most, self._figures, self._count = app, most, figures, 0

    async def __call__(self, scope, receive, send):
        if scope.get("method") != "POST":
            await self._app(scope, receive, send)
        elif self._count >= self._most:
            error = {"message": "too many requests wait for an answer", "type": "overloaded_error", "param": None, "code": None}
            headers = {"Retry-After": str(math.ceil(self._figures.last_wait))}
            await JSONResponse({"error": error}, 503, headers)(scope, receive, send)
        else:
            self._count += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self._count -= 1


def tell(text, kind):
    """Log what goes wrong in a store, in a line of the server's log."""
    logging.getLogger("uvicorn.error").log(logging.INFO if kind == "over" else logging.WARNING, text)


_publish_stream, _get_models = server.get_event_publisher, server.get_llama_proxy


async def _publish(inner_send_chan, body, **options):
    """Send a stream. An error is its last event, as the stream has begun and can have no status: the server itself would send nothing."""
    async with inner_send_chan:
        try:
            await _publish_stream(inner_send_chan=inner_send_chan.clone(), body=body, **options)
        except Exception as error:  # noqa: BLE001  of a request, a template or the model
            _, told = server.router.routes[0].error_message_wrapper(error, body)
            await inner_send_chan.send({"data": json.dumps({"error": told})})


async def _remember(request: Request):
    caller.set(Caller(request, asyncio.get_running_loop()))


async def _unless_left(request, wait):
    """Wait, until the client has gone."""
    async with anyio.create_task_group() as group:

        async def watch():
            while not await request.is_disconnected():
                await anyio.sleep(1)
            group.cancel_scope.cancel()

        group.start_soon(watch)
        await wait()
        group.cancel_scope.cancel()
        return
    raise HTTPException(400, "the client has left")
