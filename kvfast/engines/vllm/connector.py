"""A KV connector of vLLM: prompts that outlive the process, in a store of kvfast."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvfast.engines.vllm.prompts.figures import Figures, Metrics
from kvfast.engines.vllm.prompts.lookups import Lookups
from kvfast.engines.vllm.prompts.settings import Options
from kvfast.engines.vllm.prompts.transfers import Transfers


class KVFastConnector(KVConnectorBase_V1, SupportsHMA):
    """Prompts in a folder, in Redis or in an object store; see the guide of vLLM.

    A store that is slow, full or gone costs time only: what it does not give is computed.
    """

    requires_kv_delivery = False  # a chunk that is not stored is computed again

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.of(vllm_config)
        self._lookups = self._transfers = self._plan = None
        if role == KVConnectorRole.SCHEDULER:
            # The scheduler reads it after it has made the connector. By default a value that does not come would fail its request.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._lookups = Lookups(vllm_config, kv_cache_config, options)
        else:
            self._transfers = Transfers(vllm_config, kv_cache_config, options)

    # In the scheduler.

    def on_new_request(self, request):
        self._lookups.add(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count = self._lookups.matched(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._lookups.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._lookups.plan(scheduler_output)

    def update_connector_output(self, connector_output):
        if connector_output.kv_connector_worker_meta is not None:
            self._lookups.measured(connector_output.kv_connector_worker_meta)

    def request_finished(self, request, block_ids):
        self._lookups.finished(request)
        return False, None  # what is stored was copied

    request_finished_all_groups = request_finished

    # In a worker.

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata
        self._transfers.start_clock()

    def start_load_kv(self, forward_context, **options):
        self._transfers.begin(self._plan)

    def wait_for_layer_load(self, layer_name):
        pass  # requests whose prompts are being fetched wait in the scheduler

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **options):
        pass  # all layers at the end of a step

    def wait_for_save(self):
        self._transfers.finish(self._plan)

    def get_transfer_results(self, finished_req_ids):
        ended, failed = self._transfers.finished()
        # vLLM finds requests by their blocks if there is one group, and then keeps what came before them.
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed if self._has_groups else set())

    def get_block_ids_with_load_errors(self):
        found = self._transfers.failed_blocks()
        return set() if self._has_groups else found

    def build_connector_worker_meta(self):
        return self._transfers.rates()

    @property
    def _has_groups(self):
        return len(self._kv_cache_config.kv_cache_groups) > 1

    def flush(self):
        """Wait for what is being stored."""
        self._transfers.flush()

    # In both.

    def get_kv_connector_stats(self):
        return (self._lookups or self._transfers).figures.taken()

    @classmethod
    def build_kv_connector_stats(cls, data=None):
        return Figures(data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        return Metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self):
        (self._lookups or self._transfers).close()
