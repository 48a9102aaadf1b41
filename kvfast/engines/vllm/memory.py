"""The layers of a KV cache group as one pool of kvfast, in vLLM's memory."""

import numpy as np
import torch

from kvfast.engine import as_numpy


def arrays_of(metadata):
    """What a step asks of all layers: [block_table, seq_lens, cu_seqlens_q] and the slots, of vLLM's CommonAttentionMetadata."""
    return [
        one.numpy() for one in (metadata.block_table_tensor, metadata.seq_lens, metadata.query_start_loc)
    ], metadata.slot_mapping.numpy()


def without_gaps(tables, slots):
    """The tables and slots of a step without the tokens that get no slot, and the rows of the others, None for all. A draft model
    computes rejected drafts once more: they are the last tokens of their texts, have no slots, and nobody reads what comes of them."""
    table, lengths, starts = tables
    rows = np.flatnonzero(slots[: starts[-1]] >= 0)
    if len(rows) == starts[-1]:
        return tables, slots, None
    kept = np.searchsorted(rows, starts).astype(starts.dtype)
    return [table, lengths - np.diff(starts - kept), kept], slots[rows], torch.from_numpy(rows)


class GroupMemory:
    """The pool of some layers whose keys and values have one format, in the tensors that vLLM has bound to them.

    vLLM binds tensors after it has made the layers, and may do so again; then there is another pool. `new_pool` makes one over the
    arrays of the layers. `cut` takes the tensors of the layers, and returns those that the pool shall have.
    """

    def __init__(self, layers, new_pool, max_num_seqs, cut=None):
        self._layers, self._new_pool, self._max_num_seqs, self._cut = layers, new_pool, max_num_seqs, cut
        self._tensors = []
        self.pool = None
        self._batch = self._metadata = None
        for layer in layers:
            layer.impl.group = self

    def bind(self):
        """Make the pool over the layers' tensors, unless it is there, and give each layer its number in it."""
        if self.pool is not None and all(layer.kv_cache is tensor for layer, tensor in zip(self._layers, self._tensors)):
            return self.pool
        tensors = [layer.kv_cache for layer in self._layers]
        numbers, buffer = {}, []
        for layer, tensor in zip(self._layers, tensors):
            place = tensor.data_ptr()
            if place not in numbers:  # layers may share the keys and values of another
                numbers[place] = len(buffer)
                buffer.append(tensor)
            layer.impl.memory, layer.impl.number = self, numbers[place]
        self.pool = self._new_pool([as_numpy(one) for one in (buffer if self._cut is None else self._cut(buffer))])
        self._tensors = tensors
        return self.pool

    def batch_of(self, metadata):
        """The PreparedBatch of a step, which the first layer that needs it prepares. Not the builder of the metadata: that may serve
        layers of another group, as those of a draft model."""
        if metadata is not self._metadata:
            self._batch = self.bind().prepare_batch(*metadata.tables, metadata.slots, max_num_seqs=self._max_num_seqs)
            self._metadata = metadata
        return self._batch
