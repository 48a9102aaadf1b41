"""Serves a model of llama.cpp by the routes of llama-cpp-python's own server (extra ``serve``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from concurrent.futures import TimeoutError as Late
from contextvars import ContextVar

import llama_cpp
import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from llama_cpp.server import app as server
from llama_cpp.server.settings import ServerSettings
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from kvfast.engines.llama_cpp.serving_figures import Answer, Figures

# Tokens of a prompt that take long enough to compute that it is stored before its answer has ended.
MANY_TOKENS = 256
_caller: ContextVar[tuple[Request, asyncio.AbstractEventLoop, Answer] | None] = ContextVar("caller", default=None)


class _ClientHasLeft(Exception):
    """Nobody waits for the answer."""


class ServedLlama(llama_cpp.Llama):
    """A ``Llama`` that stops when its client leaves, and that stores a long prompt before the answer, which a killed process does not
    end. `last` is the answer that began last, and `count` is called with each that has ended."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # One row, as nobody reads logits here: a state that is saved or loaded copies all rows.
        self.scores, self._num_computed = np.zeros((1, self.n_vocab()), np.single), 0
        self.last, self.count, self._num_restored = Answer(), lambda answer: None, 0

    def eval(self, tokens):
        for at in range(0, len(tokens), self.n_batch):
            if _client_has_left():
                raise _ClientHasLeft
            batch = tokens[at : at + self.n_batch]
            super().eval(batch)
            self._num_computed += len(batch)

    def generate(self, tokens, *args, **options):
        if options.get("grammar") is not None:
            self._check_grammar(options["grammar"])
        self._num_computed, answer = 0, _caller.get()[-1] if _caller.get() else Answer()
        try:
            for token in super().generate(tokens, *args, **options):
                if not answer.num_tokens:
                    self._begin(answer, len(tokens))
                answer.num_tokens, answer.end = answer.num_tokens + 1, time.perf_counter()
                yield token
                if answer.num_tokens == 1 and self.cache and self._num_computed >= MANY_TOKENS:
                    self.cache[self.input_ids[: self.n_tokens]] = self.save_state()
        except _ClientHasLeft:  # the answer ends here, and is stored as any other
            return
        finally:
            if answer.num_tokens:
                self.count(answer)

    def _begin(self, answer, num_tokens):
        restored = self.cache.stats.num_restored_tokens if self.cache else 0
        reused, stored, self._num_restored = num_tokens - self._num_computed, restored - self._num_restored, restored
        answer.num_prompt_tokens, answer.num_reused_tokens, answer.num_stored_tokens = num_tokens, reused, min(stored, reused)
        answer.first, self.last = time.perf_counter(), answer

    def _check_grammar(self, grammar):
        """Refuse a text that is not a grammar, which ends the process where it is used."""
        text, root = (vars(grammar)[name].encode() for name in ("_grammar", "_root"))
        sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, text, root)
        if not sampler:
            raise ValueError("the grammar, or that of the JSON schema, cannot be read")
        llama_cpp.llama_sampler_free(sampler)


class _OneModel(dict):
    """The name of a model and its Llama, which serves all requests: in the place of llama-cpp-python's ``LlamaProxy``."""

    def __call__(self, name=None):
        return next(iter(self.values()))


def make_app(name: str, llm: ServedLlama, api_key: str | None = None) -> FastAPI:
    """The application of a server. A request waits for those before it. The cache of prompts is closed with the server."""

    @contextlib.asynccontextmanager
    async def lifespan(_):
        yield
        if llm.cache:
            llm.cache.close()

    lock, models, llm.model_path = asyncio.Lock(), _OneModel({name: llm}), name  # which answers name
    figures = Figures(llm.cache.stats if llm.cache else None)
    llm.count = figures.count

    async def in_turn():
        with figures.waiting.track_inprogress():
            await lock.acquire()
        try:
            with figures.failed.count_exceptions():
                yield models
        finally:
            lock.release()

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
    return app


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
    _caller.set((request, asyncio.get_running_loop(), Answer()))


def _client_has_left():
    """Whether the client of the request that is computed has gone. The server itself asks only between the pieces of a stream."""
    if _caller.get() is None:
        return False
    request, loop, _ = _caller.get()
    if loop.is_closed():
        return True
    try:
        return asyncio.run_coroutine_threadsafe(request.is_disconnected(), loop).result(1.0)
    except Late:  # the server is busy, or has ended
        return loop.is_closed()
