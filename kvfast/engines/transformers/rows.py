"""The rows of a batch: one kvfast cache each, with the row's own tokens and no padding.

Layers are here those with keys and values of their own, counted from 0.
"""

import numpy as np
import torch

from kvfast import KVCache, RingKVCache
from kvfast.engine import as_array, storage_in

EVERYTHING = slice(None)


class RowCaches:
    """Caches of the rows of a batch. They are made when the first keys come, which have the number of rows and the shape.

    Each layer has its number as the model counts them, the tokens that it keeps (of its sliding window or of a chunk) or
    None, the size of the chunks that its attention keeps to or None, whether an indexer chooses the tokens that its queries read,
    and the tokens that it has `seen`, padding included: transformers counts these. `num_whole` are the tokens of the steps that
    reached all layers, padding included, as far as rows have counted them. `matrix` is the mask that came last, which layers
    share.
    """

    def __init__(self, numbers, windows, chunks, indexed, configured, settings, max_seq_len, rollback):
        """`configured`: the KV heads, head_dim and v_head_dim of each layer, as far as the configuration has them. Only
        differences between layers count."""
        self.numbers, self.windows, self.chunks, self.indexed = numbers, windows, chunks, indexed
        self._settings, self._max_seq_len, self._rollback = settings, max_seq_len, rollback
        # Layers of one kind have the same shape, which the keys of the first of them show.
        self._configured, self._kinds = configured, list(zip(windows, chunks, configured))
        self._shapes, self._unseen = None, set(self._kinds)
        self._stored = []  # what layers got while not all shapes are known, to be stored again
        self.clear()

    def clear(self):
        """Forget everything, the size of the batch included."""
        self.rows = []
        if self._unseen:  # a first step broke off
            self._shapes, self._unseen, self._stored = None, set(self._kinds), []
        self.seen = [0] * len(self.windows)
        self.num_whole = 0
        self._padding = None  # (batch, tokens), False for tokens that are not stored; None where all are
        self.matrix = None
        self._open = set()  # layers with tokens that are not advanced yet
        self._expected = set()  # layers whose tokens came, and were not stored yet

    # --- the tokens of a step ---

    def receive(self, layer, key, value):
        """Count new keys and values of a layer, which are still to be stored."""
        if layer in self._expected:
            raise RuntimeError(
                f"the tokens of layer {self.numbers[layer]} came and were never stored: its attention did not go through kvfast. A model that "
                f'does not call what attn_implementation="kvfast" names needs attn_implementation="sdpa" or "eager"'
            )
        for name, tensor in (("keys", key), ("values", value)):
            if tensor.requires_grad:
                raise RuntimeError(
                    "KVFastCache has no gradients: call the model under torch.no_grad(), as generate does, and train without a cache"
                )
            if tensor.device.type != "cpu":
                raise ValueError(f"KVFastCache keeps keys and values in the CPU's memory, got {name} on {tensor.device}")
        if key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"keys and values must have the same shape except for head_dim, got {tuple(key.shape)} and "
                f"{tuple(value.shape)} for layer {self.numbers[layer]}"
            )
        if self.rows and len(self.rows) != key.shape[0]:
            raise ValueError(f"this cache holds a batch of {len(self.rows)}, got keys of {key.shape[0]}: reset() it for another batch")
        if layer in self._open:
            self._advance()
            if self._expected or len(set(self.seen) - {0}) > 1:
                self._check_whole_step()
            self._unseen.clear()  # layers that no step reaches are not waited for
            self._stored.clear()
        if not self._open:
            self._check_lengths()
        self._open.add(layer)
        self._expected.add(layer)
        self.seen[layer] += key.shape[2]

    def fit(self, layer, key, value, rings):
        """Have rows, in which a layer has the shape of its new keys and values: KV heads, head_dim and v_head_dim. `rings`:
        sliding layers forget."""
        batch, shape = key.shape[0], (key.shape[1], key.shape[3], value.shape[3])
        if self._shapes is None:
            self._shapes = [
                tuple(mine if one == first else one for one, first, mine in zip(other, self._configured[layer], shape))
                for other in self._configured
            ]
        kind = self._kinds[layer]
        if self._shapes[layer] != shape:
            if kind not in self._unseen:
                raise ValueError(
                    f"layer {self.numbers[layer]} has {_text(shape)}, and layers of its kind before it have "
                    f"{_text(self._shapes[layer])}: use transformers' DynamicCache(config=model.config)"
                )
            self._shapes = [shape if other == kind else one for one, other in zip(self._shapes, self._kinds)]
            self.rows, rings = [], rings and (not self.rows or isinstance(self.rows[0], RingKVCache))
        self._unseen.discard(kind)
        if not self.rows:
            self.rows = [self._new_row(rings) for _ in range(batch)]
            for stored in self._stored:
                self._append(*stored)
        if not self._unseen:
            self._stored.clear()

    def begin(self, shapes, rings, batch=1):
        """Make the rows of a batch before their keys come, and return them. `shapes`: KV heads, head_dim and v_head_dim of each layer."""
        self.clear()
        self._shapes = shapes
        self.rows = [self._new_row(rings) for _ in range(batch)]
        return self.rows

    def go_on(self):
        """Count the tokens that the rows of `begin` got; with none, everything is as before `begin`."""
        lengths = np.array([len(row) for row in self.rows])
        if not lengths.any():
            return self.clear()
        self._unseen.clear()
        self.num_whole = int(lengths.max())
        self.seen = [self.num_whole] * len(self.windows)
        if lengths.min() < lengths.max():
            self._padding = np.arange(lengths.max()) >= (lengths.max() - lengths)[:, None]

    def _new_row(self, rings):
        *shapes, v_head_dim = (list(sizes) for sizes in zip(*self._shapes))
        settings = self._settings | {"v_head_dim": v_head_dim}
        if rings and any(self.windows):
            return RingKVCache(len(self.windows), *shapes, self.windows, rollback=self._rollback, **settings)
        return KVCache(len(self.windows), *shapes, self._max_seq_len, **settings)

    def pattern(self, layer):
        """The sliding window and the chunk of a layer's attention, of which at least one is None."""
        chunk = self.chunks[layer]
        return None if chunk else self.windows[layer], chunk

    def kept(self, layer):
        """Which tokens of a layer are stored: bool of shape (batch, tokens), False for padding."""
        kept = np.ones((len(self.rows), self.seen[layer]), bool)
        if self._padding is not None:
            known = self._padding[:, : self.seen[layer]]
            kept[:, : known.shape[1]] = known
        return kept

    def parts(self, layer, n, mask):
        """Which of the `n` new tokens of a layer each row has: slices or indices, None for none.

        `mask` is that of the step, or None for a causal one without padding.
        """
        before = self.seen[layer] - n
        if mask is None:
            return self._new_parts(before, n, None)
        if mask.width not in (None, before + n):
            raise ValueError(
                f"attention_mask is for {mask.width} tokens, but with this step the cache has got {before + n}: was it "
                f"filled before, or does generate give it every token again, as with use_cache=False?"
            )
        self.check_place(layer, n, mask.q_offset, mask.q_length)
        owner, parts = mask.parts
        if owner is not self:
            parts = self._new_parts(before, n, mask.padding)
            mask.parts = self, parts
        return parts

    def check_place(self, layer, n, q_offset, q_length):
        """Refuse a mask that is not for the `n` new tokens of a layer, and let the step come again."""
        before = self.seen[layer] - n
        if (q_offset, q_length) != (before, n):
            self._expected.discard(layer)
            self.seen[layer] = before
            raise RuntimeError(
                f"layer {self.numbers[layer]} holds {before} tokens and got {n} more, and the mask is one for {q_offset} and {q_length}: "
                f"the step before broke off between two layers, or the mask is not this cache's. {self._way_back()}"
            )

    def _new_parts(self, before, n, padding):
        if padding is None and self._padding is None:
            return [EVERYTHING] * len(self.rows)
        shape = len(self.rows), before + n
        if padding is None:
            padding = np.ones(shape, bool)
        elif padding.shape != shape:
            raise ValueError(f"attention_mask must have shape {shape}, the {before} tokens before included, got {padding.shape}")
        known = np.ones(shape, bool) if self._padding is None else self._padding
        if not np.array_equal(padding[:, :before], known[:, :before]):
            raise ValueError(
                "attention_mask differs from what it was when the tokens before came: what was stored stays visible, "
                "and padding was not stored"
            )
        if shape[1] > min(filter(None, self.windows), default=shape[1]) and not _pads_left(padding):
            raise ValueError(
                "attention_mask has padding after the first token of a row, which kvfast cannot count in a "
                "sliding window: pad on the left"
            )
        self._padding = padding
        return [_part(row) for row in padding[:, before:]]

    def store(self, layer, parts, keys, values):
        """Append the tokens of `receive`: arrays of shape (batch, heads, n, head_dim)."""
        self._expected.remove(layer)
        if self._unseen:
            self._stored.append((layer, parts, keys, values))
        self._append(layer, parts, keys, values)

    def _append(self, layer, parts, keys, values):
        for row, part, k, v in zip(self.rows, parts, keys, values):
            if part is not None:
                row.append(layer, k.transpose(1, 0, 2)[part], v.transpose(1, 0, 2)[part])

    def awaits(self, layer):
        """Whether new tokens of a layer are still to be stored."""
        return layer in self._expected

    def check_whole(self):
        """Raise ValueError where a row lacks tokens that another attention would look for."""
        if self._padding is not None or (self.rows and isinstance(self.rows[0], RingKVCache)):
            raise ValueError(
                'this cache was filled under attn_implementation="kvfast", without padding and without what has left '
                "the sliding windows: go on with that, or reset() it"
            )

    def pads_left(self):
        """Whether all padding is before the tokens of each row."""
        return self._padding is None or _pads_left(self._padding)

    def first_seen(self, layer, length):
        """The first token that the last one of `length` sees at most: what a layer of transformers' own would show."""
        window = self.windows[layer]
        return 0 if window is None else max(0, length - window)

    def decoded(self, layer):
        """Keys and values of a layer, float32 tensors of the shape that transformers' own caches have."""
        self.check_whole()
        heads, *widths = self._shapes[layer]
        k, v = (torch.empty(len(self.rows), heads, self.seen[layer], width) for width in widths)
        for row, k_out, v_out in zip(self.rows, k.numpy(), v.numpy()):
            k_out[...] = row.k(layer).transpose(1, 0, 2)
            v_out[...] = row.v(layer).transpose(1, 0, 2)
        return k, v

    # --- between steps ---

    def is_whole(self):
        """Whether all layers got the tokens of the last step. If not, the next mask will show whether the step ended."""
        return not self._expected and len(set(self.seen)) <= 1

    def _check_whole_step(self):
        if not self.is_whole():
            seen = " or ".join(map(str, sorted(set(self.seen))))
            raise RuntimeError(f"the last step did not reach every layer (they have seen {seen} tokens). {self._way_back()}")

    def _way_back(self):
        ahead = self.seen[0] - self.num_whole
        return f"crop({-ahead}) takes the step back, or reset() the cache" if ahead else "reset() the cache"

    def _check_lengths(self):
        """Raise RuntimeError if somebody else has changed a row."""
        counted = [self.seen[0]] * len(self.rows) if self._padding is None else self.kept(0).sum(1).tolist()
        for i, (row, n) in enumerate(zip(self.rows, counted)):
            if len(row) != n:
                raise RuntimeError(
                    f"rows[{i}] holds {len(row)} tokens, and the cache has counted {n}: change a cache by its own crop, restore and reset, "
                    f"and its rows not at all; rows[{i}].fork() is one to change"
                )

    def _advance(self):
        """Count the tokens that all layers got as complete."""
        if not self.is_whole():
            return
        for row in self.rows:
            new = row.layer_length(0) - len(row)
            if new:
                row.advance(new)
        self.num_whole = self.seen[0]
        self._open.clear()

    def undo(self, count):
        """Take back a step that did not reach every layer, as a part of the last `count` tokens. Returns how many are left to drop."""
        if self.is_whole():
            return count
        left = count - (self.seen[0] - self.num_whole)
        if left < 0:
            self._check_whole_step()
        if not self.num_whole:
            self.clear()
            return 0
        for row in self.rows:
            row.truncate(len(row))
        self._open.clear()
        self._expected.clear()
        self._cut(self.num_whole)
        return left

    def _cut(self, n):
        """Count the first `n` tokens alone."""
        self.seen, self.num_whole = [n] * len(self.seen), min(self.num_whole, n)
        if self._padding is not None:
            self._padding = self._padding[:, :n]

    def is_settled(self):
        """Whether this is between two steps."""
        self._advance()
        return not self._open

    def settled(self):
        """The rows, between two steps."""
        self._check_whole_step()
        self._advance()
        return self.rows

    def lengths_after(self, count):
        """Tokens of each row once the last `count`, padding included, are dropped."""
        self._check_whole_step()
        keep = max(self.seen[0] - count, 0)
        drops = [self.seen[0] - keep] * len(self.rows) if self._padding is None else self._padding[:, keep:].sum(1)
        return [row.layer_length(0) - int(drop) for row, drop in zip(self.rows, drops)]

    def crop(self, count, states=None):
        """Drop the last `count` tokens of every row, padding included. `states`: those of each row after the tokens that stay, where
        there need be no checkpoint."""
        count = self.undo(count)
        lengths, keep = self.lengths_after(count), max(self.seen[0] - count, 0)
        if states is None and all(n >= len(row) for row, n in zip(self.rows, lengths)):
            for row, n in zip(self.rows, lengths):  # rejected drafts leave no trace if nobody has counted them
                row.truncate(len(row), keep=range(n - len(row)))
        else:
            self._crop_counted(lengths, states)
        self._cut(keep)

    def _crop_counted(self, lengths, states):
        rows = self.settled()
        snapshots = [row.snapshot() for row in rows] if len(rows) > 1 else []
        try:
            for row, n, own in zip(rows, lengths, states or [None] * len(rows)):
                storage_in(row).truncate(n, None, own if n else None)
        except ValueError:
            for row, snapshot in zip(rows, snapshots):
                row.restore(snapshot)
            raise

    def indices_of(self, given, name, takes_mask=False):
        """The rows that integers, or a mask, name, as a list; of no rows none."""
        count, array = len(self.rows), as_array(given.cpu() if isinstance(given, torch.Tensor) else given, name)
        if takes_mask and array.dtype == bool and array.shape == (count,):
            array = np.flatnonzero(array)
        if count and (array.ndim != 1 or array.dtype.kind not in "iu" or not array.size):
            wanted = f"integers of shape (num_rows,){f', or a mask of shape ({count},)' * takes_mask}, for at least one row"
            raise ValueError(f"{name} must be {wanted}, got {array.dtype} of shape {array.shape}")
        indices = array.tolist() if count else []
        for i in indices:
            if not -count <= i < count:
                raise IndexError(f"{name} must be between {-count} and {count - 1}, got {i}")
        return [i % count for i in indices]

    def select(self, indices):
        """Let the batch be the rows of some indices; one that is named twice is shared until it is written."""
        rows, taken, chosen = self.settled(), set(), []
        for index in indices:
            row = rows[index]
            chosen.append(row.fork() if index in taken else row)
            taken.add(index)
        self.rows = chosen
        if self._padding is not None:
            self._padding = self._padding[indices]

    def copy(self):
        """Independent copies."""
        rows, other = self.settled(), object.__new__(RowCaches)  # the former counts the last step
        other.__dict__.update(self.__dict__)
        other.rows = [row.copy() for row in rows]
        other.seen, other._open, other._expected = list(self.seen), set(), set()
        other._unseen, other._stored = set(self._unseen), []
        return other

    @property
    def nbytes(self):
        """Bytes reserved, what rows share counted once."""
        pools = {id(table.pool): table.pool for row in self.rows for table in storage_in(row).tables}
        storages = [storage_in(row) for row in self.rows]
        checkpoints = {id(one): one for storage in storages if storage.checkpoints for one in storage.checkpoints.held.values()}
        return sum(pool.nbytes for pool in pools.values()) + sum(one.data.nbytes for one in checkpoints.values())


def _text(shape):
    heads, k_dim, v_dim = shape
    return f"{heads} KV heads of {k_dim}" + (f" and {v_dim}" if v_dim != k_dim else "")


def _pads_left(kept):
    """Whether no padding follows a token, in an array of shape (batch, tokens)."""
    return not (np.logical_or.accumulate(kept, axis=1) & ~kept).any()


def _part(row):
    """The True entries of a row: a slice where they end it in one piece, else indices; None if there are none."""
    count = int(row.sum())
    if count == 0:
        return None
    return slice(len(row) - count, None) if row[len(row) - count :].all() else np.flatnonzero(row)
