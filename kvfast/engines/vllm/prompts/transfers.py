"""In a worker of vLLM: chunks from a store to vLLM's blocks, and from these to the store."""

import time
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger

from kvfast.engine import Rate, Workers, new_value, wait_for_any
from kvfast.engines.vllm.prompts.figures import Figures
from kvfast.engines.vllm.prompts.layers import GroupLayers
from kvfast.engines.vllm.prompts.settings import IDLE_WAIT, chunk_tokens_of, groups_of, parts_of

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
    """Fetches in the background, and copies what it stores before a step ends."""

    def __init__(self, vllm_config, kv_cache_config, options):
        self._config, self._kv_cache_config = vllm_config, kv_cache_config
        self._groups = groups_of(kv_cache_config)
        rank = get_pp_group().rank_in_group * get_tp_group().world_size + get_tp_group().rank_in_group
        self._parts = parts_of(vllm_config, self._groups)[rank]
        self.chunk_tokens = chunk_tokens_of(options, self._groups)
        self.figures = Figures()
        self._store, self._threads = options.open(self.figures), Workers(FETCHES, "kvfast-fetch")
        self._layers, self._fetches, self._failed = None, {}, set()
        self._fetched, self._computed, self._begin, self._is_idle = Rate(), Rate(), 0.0, False

    def start_clock(self):
        """Begin to measure how long a step computes."""
        self._begin = time.perf_counter()

    def begin(self, work):
        """Begin the fetches of a step."""
        self._is_idle = not work.num_tokens
        for request_id, chunks in work.fetched.items():
            layers = self._group_layers()
            self._fetches[request_id] = chunks, self._threads.submit(lambda chunks=chunks, layers=layers: self._fetch(chunks, layers))

    def finish(self, work):
        """Store the chunks that a step has computed."""
        if work.num_tokens >= MANY_TOKENS:
            self._computed.measured(work.num_tokens, time.perf_counter() - self._begin)
        for chunk in work.stored:
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
            good, floats, seconds = (0, [], 0.0) if call.exception() else call.result()
            if call.exception():
                logger.warning_once("kvfast computes a prompt that it could not fetch: %r", call.exception())
            self.figures.add(seconds=seconds, num_failures=int(good < len(chunks)))
            for i, layers in enumerate(self._group_layers()):
                ids = [one for chunk in chunks[:good] for one in chunk.block_ids[i] if one]
                if ids:
                    layers.take(ids, floats[i])
            if good < len(chunks):
                failed.add(request_id)
                self._failed.update(one for chunk in chunks[good:] for ids in chunk.block_ids for one in ids if one)
            else:
                self._fetched.measured(good * self.chunk_tokens, seconds)
        return set(ended), failed

    def failed_blocks(self):
        """Blocks that were not fetched, since the last call."""
        found, self._failed = self._failed, set()
        return found

    def rates(self):
        return Rates(self._fetched.value, self._computed.value) if self._fetched.value and self._computed.value else None

    def flush(self):
        self._store.flush()

    def close(self):
        self._threads.close(wait=False)
        self._store.close()

    def _fetch(self, chunks, layers):
        """Fetch chunks, and write them to their blocks. Returns how many first ones came, floats of the first tokens for each group, and
        seconds."""
        begin, floats = time.perf_counter(), [b""] * len(layers)
        wanted = [(number, i) for number, chunk in enumerate(chunks) for i in range(len(layers)) if any(chunk.block_ids[i])]

        def write(at, payload):
            number, i = wanted[at]
            floats[i] = layers[i].write(chunks[number].block_ids[i], payload) or floats[i]

        parts = [(self._store.part(chunks[n].node, self._parts[i]), layers[i].nbytes(chunks[n].index)) for n, i in wanted]
        good = self._store.fetch(parts, self._store.deadline(), write, num_threads=1)  # a model computes meanwhile
        return len(chunks) if good == len(wanted) else wanted[good][0], floats, time.perf_counter() - begin

    def _put(self, layers, chunk, ids, part):
        """Copy a part of a chunk, and let it be stored. False if no other part of the chunk is needed."""
        is_begun = False
        if not self._store.is_paused:
            value, payload = new_value(layers.nbytes(chunk.index))
            if not layers.read(chunk.index, ids, payload):
                return False
            key, num_tokens = self._store.part(chunk.node, part), (chunk.index + 1) * self.chunk_tokens
            is_begun = self._store.put_missing(key, value, num_tokens) is not None
        if not is_begun:
            self.figures.add(num_dropped=1)
        return is_begun

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
