"""In a worker of vLLM: chunks from a store to vLLM's blocks, and from these to the store."""

import time
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from kvfast.core.workers import Workers, wait_for_any
from kvfast.engines.vllm.prompts.figures import Figures
from kvfast.engines.vllm.prompts.layers import GroupLayers
from kvfast.engines.vllm.prompts.settings import IDLE_WAIT, chunk_tokens_of, groups_of, parts_of, secret
from kvfast.prompts.chain import key_of, part_of
from kvfast.prompts.envelope import complete, new_value
from kvfast.prompts.fetching import BYTES_AT_ONCE
from kvfast.prompts.patient import WEIGHT
from kvfast.prompts.writer import Writer

logger = init_logger("vllm.kvfast")

FETCHES = 2  # at once
MANY_TOKENS = 64  # of a step whose time tells how fast prompts are computed


@dataclass
class Rates(KVConnectorWorkerMetadata):
    """Tokens per second."""

    fetched: float
    computed: float

    def aggregate(self, other):
        return Rates(min(self.fetched, other.fetched), max(self.computed, other.computed))


class Transfers:
    """Fetches in the background, and copies what it stores before a step ends.

    Parameters
    ----------
    vllm_config : VllmConfig
    kv_cache_config : KVCacheConfig
    options : Options
    """

    def __init__(self, vllm_config, kv_cache_config, options):
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._groups, self._secret = groups_of(kv_cache_config), secret()
        rank = get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group
        self._parts = parts_of(vllm_config, self._groups)[rank]
        self.chunk_tokens = chunk_tokens_of(options, self._groups)
        self._store, self.figures = options.open(), Figures()
        self._threads, self._writer = Workers(FETCHES, "kvfast-fetch"), Writer(self._store, self.figures)
        self._layers, self._fetches, self._failed = None, {}, set()
        self._rates, self._begin, self._is_idle = {}, 0.0, False

    def start_clock(self):
        """Begin to measure how long a step computes."""
        self._begin = time.perf_counter()

    def begin(self, plan):
        """Begin the fetches of a step."""
        self._is_idle = not plan.num_tokens
        for request_id, chunks in plan.fetched.items():
            layers = self._group_layers()
            self._fetches[request_id] = chunks, self._threads.submit(lambda chunks=chunks, layers=layers: self._fetch(chunks, layers))

    def finish(self, plan):
        """Store what a step has computed."""
        seconds = time.perf_counter() - self._begin
        if plan.num_tokens >= MANY_TOKENS and seconds:
            self._measured("computed", plan.num_tokens / seconds)
        for chunk in plan.stored:
            for layers, ids, part in zip(self._group_layers(), chunk.block_ids, self._parts):
                if all(ids) and not self._put(layers, chunk, ids, part):
                    break

    def finished(self):
        """The requests whose fetches have ended, and those of them that did not get all."""
        if self._is_idle and self._fetches:
            wait_for_any([call for _, call in self._fetches.values()], IDLE_WAIT)
        ended = [request_id for request_id, (_, call) in self._fetches.items() if call.done()]
        failed = set()
        for request_id in ended:
            chunks, call = self._fetches.pop(request_id)
            good, floats, seconds, nbytes = (0, [], 0.0, 0) if call.exception() else call.result()
            if call.exception():
                logger.warning_once("kvfast computes a prompt that it could not fetch: %r", call.exception())
            self.figures.add(seconds=seconds, bytes_fetched=nbytes, num_failures=int(good < len(chunks)))
            for i, layers in enumerate(self._group_layers()):
                ids = [one for chunk in chunks[:good] for one in chunk.block_ids[i] if one]
                if ids:
                    layers.take(ids, floats[i])
            if good < len(chunks):
                failed.add(request_id)
                self._failed.update(one for chunk in chunks[good:] for ids in chunk.block_ids for one in ids if one)
            elif nbytes:
                self._measured("fetched", good * self.chunk_tokens / seconds)
        return set(ended), failed

    def failed_blocks(self):
        """Blocks that were not fetched, since the last call."""
        found, self._failed = self._failed, set()
        return found

    def rates(self):
        return Rates(**self._rates) if len(self._rates) == 2 else None

    def flush(self):
        self._writer.flush()
        self._store.settle()

    def close(self):
        self._threads.close(wait=False)
        self._writer.close()
        self._store.close()

    def _fetch(self, chunks, layers):
        """Fetch chunks, verify them, and write them to their blocks. Returns how many first ones came, floats of the first tokens for
        each group, seconds and bytes."""
        begin, floats, total = time.perf_counter(), [b""] * len(layers), 0
        wanted = [
            (number, chunk, i, part_of(chunk.node, self._parts[i], self._secret))
            for number, chunk in enumerate(chunks)
            for i in range(len(layers))
            if any(chunk.block_ids[i])
        ]
        good, deadline = len(chunks), self._store.deadline()
        size = max((layers[i].nbytes(chunk.index) for _, chunk, i, _ in wanted), default=0)
        each = max(1, BYTES_AT_ONCE // max(1, size))
        for at in range(0, len(wanted), each):
            several = wanted[at : at + each]
            values = self._store.get_many([key_of("c", digest) for *_, digest in several], deadline)
            for (number, chunk, i, digest), value in zip(several, values):
                found = self._store.take(key_of("c", digest), value, digest, self._secret, nbytes=layers[i].nbytes(chunk.index))
                if found is None:
                    good = min(good, number)
                elif number < good:
                    floats[i] = layers[i].write(chunk.block_ids[i], found) or floats[i]
                    total += len(found)
            if good < len(chunks):
                break
        self._store.touch([key_of("c", digest) for number, *_, digest in reversed(wanted) if number < good])
        return good, floats, time.perf_counter() - begin, total

    def _put(self, layers, chunk, ids, part):
        """Copy a part of a chunk, and let it be stored. False if no other part of the chunk is needed."""
        digest = part_of(chunk.node, part, self._secret)
        if self._store.is_paused:
            self.figures.add(num_dropped=1)
            return False
        value, payload = new_value(layers.nbytes(chunk.index))
        if not layers.read(chunk.index, ids, payload):
            return False
        num_tokens = (chunk.index + 1) * self.chunk_tokens
        if self._writer.put_missing(key_of("c", digest), value, lambda: complete(value, digest, self._secret, num_tokens)) is None:
            self.figures.add(num_dropped=1)
            return False
        return True

    def _measured(self, name, rate):
        before = self._rates.get(name, rate)
        self._rates[name] = WEIGHT * rate + (1 - WEIGHT) * before

    def _group_layers(self):
        """The layers of each group; their tensors come after the connector."""
        if self._layers is None:
            named = self._config.compilation_config.static_forward_context
            config = self._kv_cache_config
            self._layers = [
                GroupLayers([named[name] for name in one.layer_names], config.num_blocks, group.blocks(self.chunk_tokens))
                for one, group in zip(config.kv_cache_groups, self._groups)
            ]
        return self._layers
