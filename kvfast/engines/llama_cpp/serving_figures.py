"""Figures of a server: for Prometheus, and a line of the log for each answer. None has the text of a prompt."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


@dataclass
class Answer:
    """The tokens of a prompt, those of them that were in memory or came from the store, and of its answer; and times."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_stored_tokens: int = 0
    num_tokens: int = 0
    begin: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    end: float = 0.0


class Figures:
    """Counts of a server, in a `registry` of their own."""

    def __init__(self, stats):
        self.registry, self.last_wait = CollectorRegistry(), 1.0  # seconds
        self.waiting = self._new(Gauge, "waiting_requests", "requests that wait for a context")
        self.failed = self._new(Counter, "failed_requests", "requests that ended with an error")
        self._tokens = self._new(Counter, "prompt_tokens", "tokens of prompts, by where they came from", ["source"])
        self._answers = self._new(Counter, "answers", "answers that began")
        self._answer_tokens = self._new(Counter, "answer_tokens", "tokens of answers")
        self._first = self._new(Histogram, "seconds_to_first_token", "from a request to its first token", buckets=SECONDS)
        for name in () if stats is None else ("bytes_fetched", "bytes_written", "bytes_refused"):
            gauge = self._new(Gauge, f"store_{name}", "bytes of prompts since the server began")
            gauge.set_function(lambda name=name: getattr(stats, name))

    def count(self, answer):
        """Count an answer that has ended."""
        in_memory = answer.num_reused_tokens - answer.num_stored_tokens
        computed, waited = answer.num_prompt_tokens - answer.num_reused_tokens, answer.first - answer.begin
        for source, count in (("memory", in_memory), ("store", answer.num_stored_tokens), ("computed", computed)):
            self._tokens.labels(source).inc(count)
        self.last_wait = waited
        self._answers.inc()
        self._answer_tokens.inc(answer.num_tokens)
        self._first.observe(waited)
        logging.getLogger("uvicorn.error").info(
            "prompt of %d tokens: %d in memory, %d from the store, %d computed, first token after %.2f s; answer of %d tokens in %.2f s",
            *(answer.num_prompt_tokens, in_memory, answer.num_stored_tokens, computed, waited),
            *(answer.num_tokens, answer.end - answer.first),
        )

    def _new(self, kind, name, told, *labels, **options):
        return kind(f"kvfast_{name}", told, *labels, registry=self.registry, **options)
