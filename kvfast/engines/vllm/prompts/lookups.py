"""In vLLM's scheduler: which chunks of a prompt the store has, and which are to be fetched and stored."""

import json
import os
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

from kvfast.engine import Rate, Workers, files_digest, files_status, wait_for_any
from kvfast.engines.vllm.prompts.figures import Figures
from kvfast.engines.vllm.prompts.settings import IDLE_WAIT, chunk_tokens_of, groups_of, parts_of, settings_text

logger = init_logger("vllm.kvfast")

LOOKUPS = 4  # at once
MOST_RECENT = 1 << 14  # chunks that are known to be on their way to the store


@dataclass
class Chunk:
    """A chunk that a worker fetches or stores."""

    index: int  # in its prompt
    node: bytes  # the digest of its prompt up to its end
    block_ids: list[list[int]]  # of each group; 0 for one that is not there


@dataclass
class StepWork(KVConnectorMetadata):
    """The chunks that the workers fetch and store in one step."""

    fetched: dict[str, list[Chunk]] = field(default_factory=dict)  # by request
    stored: list[Chunk] = field(default_factory=list)
    num_tokens: int = 0  # that the step computes


class Known:
    """A request: its chain of digests, once its look-up has ended, and the look-up's answer: what the store has of it."""

    def __init__(self, request):
        self.request, self.answer = request, None
        self.chain = None  # also when nothing more is stored
        self.adapter = self.status = None  # of its files
        self.begin, self.num_preemptions = time.monotonic(), request.num_preemptions
        self.saved = 0  # first chunks that the store has or gets
        self.is_counted = self.is_fetched = False
        self.num_local = 0  # first tokens that vLLM has
        self.end = 0  # of the tokens to fetch


class Lookups:
    """Answers the scheduler, and never waits for a store."""

    def __init__(self, vllm_config, kv_cache_config, options):
        self._groups = groups_of(kv_cache_config)
        self._parts = [part for rank in parts_of(vllm_config, self._groups) for part in rank]
        self.chunk_tokens = chunk_tokens_of(options, self._groups)
        self.figures = Figures()
        self._store = options.open(self.figures)
        logger.info("kvfast keeps prompts in %s", self._store.store.url)
        self._threads = Workers(LOOKUPS, "kvfast-lookup")
        # It reads all weights of the model. Look-ups wait for it.
        folder = os.getcwd()  # the program may change it
        self._text = self._threads.submit(lambda: settings_text(vllm_config, kv_cache_config, options, folder))
        self._known, self._work, self._recent = {}, StepWork(), {}
        # Digests of adapters: of what vLLM has loaded, by its number, and of all that were at a path.
        self._loaded, self._seen = {}, {}
        self._is_idle = True
        # Tokens per second: fetched, as a worker told and as is expected now; and computed.
        self._told_rate, self._fetched, self._compute_rate = 0.0, Rate(), 0.0

    def add(self, request):
        """Begin the look-up of a request, unless it was. Returns None for a prompt that the store cannot have."""
        known = self._known.get(request.request_id)
        if known is not None and known.num_preemptions == request.num_preemptions:
            return known
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return None
        known = self._known[request.request_id] = Known(request)
        token_ids = np.array(request.all_token_ids, np.int64)
        known.answer = self._threads.submit(lambda: self._look_up(known, token_ids))
        return known

    def matched(self, request, num_local):
        """Tokens after the first `num_local` ones that can be fetched; None if that is not known yet."""
        known = None if request.skip_reading_prefix_cache else self.add(request)
        if known is None or known.is_fetched:  # what did not come is not asked for again
            return 0
        if not known.answer.done() and self._is_idle:
            wait_for_any([known.answer], IDLE_WAIT)
        if not known.answer.done():
            return None
        # With prefix_match_unit, vLLM may have the first tokens of a block, of which the others cannot be fetched.
        known.num_local, known.end = num_local, 0
        if not any(num_local % group.block_size for group in self._groups):
            known.end = self._longest(self._answer(known), num_local)
        if known.end and self._compute_rate and self._fetched.takes_longer(1, 1 / self._compute_rate):
            known.end = 0
        return max(0, known.end - num_local)

    def allocated(self, request, block_ids, num_tokens):
        """Plan the fetch of the last `num_tokens` tokens of those that were matched, into the blocks of each group."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        if num_tokens:
            known.is_fetched = True
            first = (known.end - num_tokens) // self.chunk_tokens
            chunks = [self._chunk(known, i, block_ids, known.end - num_tokens) for i in range(first, known.end // self.chunk_tokens)]
            self._work.fetched[request.request_id] = chunks
            logger.info_once("kvfast has found a prompt in %s", self._store.store.url)
            self.figures.add(num_hits=1, num_restored_tokens=num_tokens)
        if not known.is_counted:
            known.is_counted = True
            self.figures.add(num_prompts=1, num_tokens=request.num_tokens - known.num_local)

    def plan(self, scheduler_output):
        """The work of this step."""
        work, self._work = self._work, StepWork()
        counts, state = scheduler_output.num_scheduled_tokens, scheduler_output.kv_connector_block_state
        self._is_idle, work.num_tokens = not counts, scheduler_output.total_num_scheduled_tokens
        for request_id, count in counts.items():
            known = self._known.get(request_id)
            if known is None or not known.answer.done() or known.chain is None:
                continue
            # The last tokens of a step may be drafts: those of a request are known.
            complete = min(known.request.num_computed_tokens + count, known.request.num_tokens)
            if complete // self.chunk_tokens > known.saved:
                if not self._is_of_its_adapter(known):
                    known.chain = None
                    continue
                block_ids, here = state.get_block_ids(request_id), self._answer(known)
                known.chain.grow(np.array(known.request.all_token_ids[:complete], np.int64), partial(_others, known.request))
                for i in range(known.saved, complete // self.chunk_tokens):
                    # What was to be fetched, and is computed, was lost.
                    is_lost = known.is_fetched and known.request.num_computed_tokens < (i + 1) * self.chunk_tokens <= known.end
                    chunk = self._chunk(known, i, block_ids)
                    is_there = i < here.shape[1] and here[self._needed(chunk), i].all() and not is_lost
                    if not is_there and self._is_new(known, known.chain.nodes[i + 1]):
                        work.stored.append(chunk)
                known.saved = complete // self.chunk_tokens
        return work

    def finished(self, request):
        self._known.pop(request.request_id, None)

    def measured(self, rates):
        """Take the tokens per second that the slowest worker fetches, and those that it computes. They come after every step."""
        if rates.fetched != self._told_rate:
            self._told_rate, self._fetched = rates.fetched, Rate(rates.fetched)
        self._compute_rate = rates.computed

    def close(self):
        self._threads.close(wait=False)
        self._store.close()

    def _look_up(self, known, token_ids):
        """Which chunks of a prompt the store has: bool of shape (parts, chunks). The last token is never fetched."""
        request = known.request
        known.status = _status_of(request.lora_request)  # before the digest: a change between both is one after it
        known.adapter = self._adapter(request.lora_request)
        if known.adapter is None:
            logger.warning_once(
                "kvfast computes prompts of the adapter %s, and stores none: its files were replaced after vLLM had loaded it, as number "
                "%d. Load it again under another number, or with load_inplace",
                request.lora_request.lora_name,
                request.lora_request.lora_int_id,
            )
            return np.zeros((len(self._parts), 0), bool)
        text = json.dumps([self._text.result(), request.cache_salt, known.adapter])
        chain = self._store.chain(text, token_ids[:0], self.chunk_tokens)
        chain.grow(token_ids, partial(_others, request))
        known.chain, count = chain, max(0, len(token_ids) - 1) // self.chunk_tokens
        keys = [self._store.part(node, part) for part in self._parts for node in chain.nodes[1 : count + 1]]
        return np.array(self._store.contains(keys, self._store.deadline()), bool).reshape(len(self._parts), count)

    def _adapter(self, lora):
        """What tells an adapter from others. None if it is not known which one vLLM has: its files were replaced, and are not loaded
        again."""
        if lora is None:
            return ""
        digest = files_digest(lora.lora_path) or lora.lora_path
        self._seen.setdefault((lora.lora_name, lora.lora_path), set()).add(digest)
        if lora.load_inplace:  # with each step
            self._loaded[lora.lora_int_id] = digest
        return f"{lora.lora_name} {digest}" if self._loaded.setdefault(lora.lora_int_id, digest) == digest else None

    def _is_of_its_adapter(self, known):
        """Whether all blocks of a request are those of the adapter with which it was looked up. Reads no file."""
        lora = known.request.lora_request
        if lora is None:
            return True
        is_same = known.status is not None and known.status == _status_of(lora)
        if not is_same or known.adapter != f"{lora.lora_name} {self._loaded[lora.lora_int_id]}":
            return False
        # vLLM finds blocks by name and path of an adapter, and so those of one that was there before.
        return not known.num_local or len(self._seen[lora.lora_name, lora.lora_path]) == 1

    def _answer(self, known):
        """What a look-up that has ended found: nothing, if it failed, as for weights that cannot be read."""
        error = known.answer.exception()
        if error is None:
            return known.answer.result()
        logger.warning_once("kvfast computes prompts that it could not look up: %r", error)
        return np.zeros((len(self._parts), 0), bool)

    def _longest(self, here, num_local):
        """The end of the longest prefix of which the store has all that is not in the first `num_local` tokens; or 0."""
        size, first = self.chunk_tokens, num_local // self.chunk_tokens
        windows = [self._groups[i % len(self._groups)].window for i in range(len(here))]
        for end in range(here.shape[1] * size, num_local, -size):
            starts = [first if window is None else max(first, (end - window) // size) for window in windows]
            if all(row[max(0, start) : end // size].all() for row, start in zip(here, starts)):
                return end
        return 0

    def _chunk(self, known, index, block_ids, start=0):
        """A chunk, without the blocks of tokens before `start`."""
        parts = []
        for group, ids in zip(self._groups, block_ids):
            each, at = self.chunk_tokens // group.block_size, index * self.chunk_tokens
            if group.has_states:
                last = (index + 1) * each - 1
                parts.append([ids[last] if last < len(ids) else 0])
                continue
            ids = [*ids[index * each : (index + 1) * each]]
            ids += [0] * (each - len(ids))
            parts.append([0 if at + i * group.block_size < start else one for i, one in enumerate(ids)])
        return Chunk(index, known.chain.nodes[index + 1], parts)

    def _needed(self, chunk):
        """Which parts of a chunk can be stored: not a state where no step has ended."""
        found = [not group.has_states or any(ids) for group, ids in zip(self._groups, chunk.block_ids)]
        return np.array(found * (len(self._parts) // len(found)), bool)

    def _is_new(self, known, node):
        """Whether no other request has sent this chunk to the store since the store was asked."""
        if self._recent.get(node, 0.0) > known.begin:
            return False
        self._recent[node] = time.monotonic()
        if len(self._recent) > MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        return True


def _status_of(lora):
    return None if lora is None else files_status(lora.lora_path)


def _others(request, first, last):
    """What some tokens of a request depend on besides themselves: images at their places."""
    found = []
    for one in request.mm_features or ():
        start = one.mm_position.offset
        if start < last and start + one.mm_position.length > first:
            found.append(f"{one.modality} {one.identifier} at {start - first}")
    return "\n".join(found).encode()
