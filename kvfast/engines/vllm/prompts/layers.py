"""The blocks of vLLM's layers, as the parts of chunks."""

import numpy as np
import torch


class GroupLayers:
    """The layers of a KV cache group that a worker has.

    vLLM's blocks may be several of a layer's own. A part of a chunk has the blocks of each layer, and if it is the first, the floats
    that sequences keep of their first tokens. `num_blocks` are those of vLLM, `blocks` those of a chunk.
    """

    def __init__(self, layers, num_blocks, blocks):
        self._blocks, self._arrays, self._memories = blocks, {}, {}
        for layer in layers:
            # Layers may share the keys and values of another, and may have several states.
            for tensor in layer.kv_cache if isinstance(layer.kv_cache, tuple) else (layer.kv_cache,):
                self._arrays.setdefault(tensor.data_ptr(), tensor.view(torch.uint8).numpy())
            memory = getattr(getattr(layer, "impl", None), "group", None)
            if memory is not None:
                self._memories[id(memory)] = memory
        self._arrays = [(array, array.shape[0] // num_blocks) for array in self._arrays.values()]
        self._num_blocks = num_blocks

    def nbytes(self, index):
        """Bytes of the part of chunk `index`."""
        blocks = sum(array[0].nbytes * each for array, each in self._arrays) * self._blocks
        return blocks + (sum(pool.first_float_rows_nbytes for pool, _ in self._pools()) if index == 0 else 0)

    def read(self, index, block_ids, payload):
        """Copy the blocks of chunk `index` to its payload. False if they do not hold all of their tokens, which only a layer's next
        tokens can change."""
        for pool, each in self._pools():
            if not pool.are_coded(_finer(block_ids, each)).all():
                return False
        at = 0
        for array, each in self._arrays:
            blocks = array[_finer(block_ids, each)]
            payload[at : at + blocks.nbytes] = blocks.reshape(-1).data
            at += blocks.nbytes
        for pool, each in self._pools() if index == 0 else ():
            rows = pool.first_float_rows(block_ids[0] * each)
            payload[at : at + rows.nbytes] = rows.data
            at += rows.nbytes
        return True

    def write(self, block_ids, payload):
        """Copy a payload to those blocks of a chunk that are not 0, which vLLM gives to nobody. Returns the floats after them."""
        at, wanted = 0, np.flatnonzero(block_ids)
        for array, each in self._arrays:
            nbytes = array[0].nbytes * each * self._blocks
            blocks = np.frombuffer(payload, np.uint8, nbytes, at).reshape(self._blocks, each, *array.shape[1:])
            array[_finer(np.array(block_ids)[wanted], each)] = blocks[wanted].reshape(-1, *array.shape[1:])
            at += nbytes
        return bytes(payload[at:])

    def take(self, block_ids, floats):
        """Take full blocks, which `write` has filled, as written. `floats` of a text that begins with the first of them, or b""."""
        at = 0
        for pool, each in self._pools():
            rows = np.frombuffer(floats, np.uint8, pool.first_float_rows_nbytes, at) if floats else None
            at += 0 if rows is None else rows.nbytes
            pool.take_blocks(_finer([one for one in block_ids if one], each), rows)

    def _pools(self):
        """The pools of kvfast, with the number of their blocks for one of vLLM's."""
        pools = [memory.bind() for memory in self._memories.values()]
        return [(pool, pool.num_blocks // self._num_blocks) for pool in pools]


def _finer(block_ids, each):
    """The blocks of a layer for those of vLLM."""
    ids = np.asarray(block_ids, np.int64)
    return (ids[:, None] * each + np.arange(each)).reshape(-1)
