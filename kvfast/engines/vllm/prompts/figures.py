"""What a store of prompts did for an engine, as vLLM's metrics."""

from collections import Counter
from threading import Lock

from prometheus_client import Counter as Metric
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# The names are those of `kvfast.prompts.stats.PromptCacheStats`.
FIGURES = {
    "num_prompts": "Prompts that were looked up in the store.",
    "num_hits": "Prompts of which some tokens are fetched.",
    "num_tokens": "Tokens of the prompts that were looked up, without those of vLLM's own prefix cache.",
    "num_restored_tokens": "Tokens that are fetched, and not computed.",
    "bytes_fetched": "Bytes that came from the store.",
    "bytes_written": "Bytes that the store took.",
    "seconds": "Seconds from the beginning to the end of each fetch, added up.",
    "num_failures": "Fetches of which a part did not come, and is computed.",
    "num_refused": "Parts of chunks that were offered to the store and not taken, as it is full, slow or gone.",
    "bytes_refused": "Bytes of these parts.",
    "num_dropped": "Chunks that were not offered, as the store is slower than the model, or in the pause after a failure.",
}


_lock = Lock()  # threads that write count, too; figures are sent between processes, and cannot have one


class Figures(KVConnectorStats):
    """Counters since the last step that had some."""

    def reset(self):
        self.data = {}

    def add(self, **counts):
        with _lock:
            for name, count in counts.items():
                self.data[name] = self.data.get(name, 0) + count

    def taken(self):
        """These counters, which begin anew; None if there are none."""
        with _lock:
            found, self.data = self.data, {}
        return Figures(found) if found else None

    def aggregate(self, other):
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self):
        return {name: round(self.data.get(name, 0), 3) for name in FIGURES}

    def is_empty(self):
        return not self.data


class Metrics(KVConnectorPromMetrics):
    """The counters for Prometheus: ``vllm:kvfast_prompts_num_hits`` and so on, by engine."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {}
        for name, text in FIGURES.items():
            counter = metric_types[Metric](name=f"vllm:kvfast_prompts_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data, engine_idx=0):
        for name, count in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(count)
