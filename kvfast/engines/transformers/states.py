"""The recurrent states of a model's layers, and the checkpoints that the rows of a batch keep of them.

The states of a step lie in transformers' own layers. A copy of them becomes a checkpoint between two steps.
"""

import weakref
from inspect import signature
from types import NoneType

import numpy as np
import torch
from ml_dtypes import bfloat16
from transformers.cache_utils import LinearAttentionLayer

from kvfast import IncompatibleSnapshotError, MissingCheckpointError
from kvfast.engine import MAX_TOKENS, storage_in
from kvfast.engines.transformers.layers import StoredLayer
from kvfast.engines.transformers.versions import cache_argument

# Models that transformers computes otherwise in pieces than at once.
NOT_IN_PIECES = {
    "jamba": "computes several tokens without the state before them",
    "recurrent_gemma": "keeps its states outside of a cache",
}


BROKEN = -1  # in place of the last layer: there are states of different tokens


class Recomputing:
    """A model that computes tokens of a cache again, and the tokens that it got; ValueError for a model of `NOT_IN_PIECES`.

    As long as the cache lives, a hook of the model tells the tokens. `first` is the place of the first token that is known, padding
    counted.
    """

    def __init__(self, model, cache, first=0, token_ids=()):
        kind = model.config.get_text_config(decoder=True).model_type
        if kind in NOT_IN_PIECES:
            raise ValueError(
                f"model must be None for {kind}, which {NOT_IN_PIECES[kind]} in transformers: some drafts would be misjudged"
            )
        self.model, self.first, self.token_ids = model, first, list(token_ids)
        self._shift = 0  # of positions against places: generate counts no padding
        # With it transformers refuses to assist, as none of its own caches goes back. It still refuses those, after the prompt.
        model._is_stateful = False
        known = weakref.ref(cache)

        def before(_, args, options):
            cache = known()
            if cache is not None and any(one is cache for one in (*args, *options.values())):
                self._take(options.get("input_ids", args[0] if args else None), options.get("position_ids"))

        weakref.finalize(cache, model.register_forward_pre_hook(before, with_kwargs=True).remove)

    def jumped(self, n, token_ids=()):
        """Learn that the cache holds `n` tokens, of which these are the last."""
        self.first, self.token_ids, self._shift = n - len(token_ids), list(token_ids), 0

    def copy(self, cache):
        """The same for another cache that holds the same tokens."""
        other = Recomputing(self.model, cache, self.first, self.token_ids)
        other._shift = self._shift
        return other

    def knows(self, first, length):
        """Whether the tokens of a cache of `length` are known from place `first` on."""
        return self.first <= first and self.first + len(self.token_ids) == length

    def run(self, cache, first, last, padding):
        """Compute the tokens from place `first` to `last` again, after `padding` tokens of padding."""
        token_ids, model = self.token_ids[first - self.first : last - self.first], self.model.base_model
        options = {"attention_mask": (torch.arange(last) >= padding)[None]} if padding else {}
        # Some models count positions from 0 without them, others know none.
        if "position_ids" in signature(model.forward).parameters:
            options["position_ids"] = torch.arange(first, last)[None] + self._shift
        with torch.no_grad():
            model(torch.tensor([token_ids]), **{cache_argument(): cache}, **options)

    def cut(self, n):
        """Forget the tokens from place `n` on."""
        del self.token_ids[max(0, n - self.first) :]

    def _take(self, input_ids, position_ids):
        if input_ids is None or len(input_ids) != 1:
            self.jumped(MAX_TOKENS)  # until the cache is empty
        else:
            self.token_ids += input_ids[0].tolist()
        if position_ids is not None:
            self._shift = int(position_ids.flatten()[-1]) + 1 - self.first - len(self.token_ids)


class LayerStates:
    """The states of a batch.

    A step of one token leaves a checkpoint after `stride` tokens, steps of several tokens always do, before and after them. `last`
    is the last layer that asks for something in each step. `coming` are the tokens of the step that begins.
    """

    def __init__(self, layers, rows, stride, last):
        self._layers = {i: layer for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionLayer)}
        self._rows, self._stride, self.coming = rows, stride, 0
        self._num_layers, self._last = len(layers), last
        self.jumped()

    def jumped(self):
        """Learn that the tokens of the rows are others than those of the last step."""
        self._last_layer, self._seen = self._num_layers, self._rows.seen[0]
        self._checkpoint = self._seen

    def is_whole(self):
        """Whether the last step reached every layer. Without states there is nothing that could be ahead."""
        return self._rows.is_whole() and (self._last_layer >= self._last or not self._names())

    def check_whole(self):
        """Raise RuntimeError where layers have states of other tokens than the rows hold."""
        if self.is_whole():
            return
        back = "reset() the cache"
        if self._rows.rows:
            lost = [len(row) - storage_in(row).checkpoints.nearest(len(row)) for row in self._rows.rows]
            back = f"crop({self._rows.num_whole - self._rows.seen[0] - max(lost)}) goes back to a checkpoint, or {back}"
        raise RuntimeError(f"the last step did not reach every layer, and some have states of tokens that others do not know: {back}")

    def begin(self, num_tokens):
        """Learn that a step of `num_tokens` begins. A model may say so again in layers with keys, which notice by themselves what is
        amiss."""
        if self._last_layer == BROKEN or not isinstance(self._layers.get(self._last_layer), (StoredLayer, NoneType)):
            self.check_whole()
        self.coming = num_tokens

    def enter(self, index):
        """Learn that the model has come to a layer. Layers come in their order, so a lower one than before begins a step."""
        begins = index < self._last_layer or self._last_layer == BROKEN
        if begins:
            self.check_whole()
        self._last_layer = index
        seen = self._rows.seen[0]
        if not begins or seen == self._seen or not self._rows.is_settled():
            return
        several, self._seen = seen - self._seen > 1 or self.coming > 1, seen
        if several or seen - self._checkpoint >= self._stride:
            self.take()

    def take(self):
        """Let the rows keep the states as they are now."""
        for i, row in enumerate(self._rows.settled()):
            if len(row) and len(row) not in row.checkpoints and self._names():
                row.add_checkpoint({name: _array(self._state(name)[i]) for name in self._names()})
        self._checkpoint = self._rows.seen[0]

    def load(self):
        """Take the states after the tokens that the rows hold: IncompatibleSnapshotError for those of another model."""
        found = [row.states_at() if len(row) else {} for row in self._rows.rows]
        some = next(filter(None, found), {})
        numbers = {name.split(".")[0] for name in some}
        if some and numbers != set(map(str, self._layers)):
            raise IncompatibleSnapshotError(
                f"the states must be of the layers {sorted(self._layers)} of this model, got those of {sorted(numbers)}"
            )
        if not some:
            for layer in self._layers.values():
                layer.reset()
        for name, state in some.items():  # a row without tokens begins with zeros
            self._set(name, torch.stack([_tensor(states.get(name, np.zeros_like(state))) for states in found]))
        self.jumped()

    def crop(self, count, cache, again):
        """Go back by `count` tokens, padding included. After a MissingCheckpointError, the batch is as it was."""
        broken = not self.is_whole()
        if broken:
            count, self._last_layer = self._rows.undo(count), BROKEN
        rows, lengths, seen = self._rows.settled(), self._rows.lengths_after(count), self._rows.seen[0]
        if again is not None:
            again.cut(seen)
        missing = [(row, n) for row, n in zip(rows, lengths) if 0 < n < len(row) + broken and n not in row.checkpoints]
        if missing and not broken and self._has_recorded(count):
            states = [{name: _array(self._state(name, count)[i]) for name in self._names()} for i in range(len(rows))]
            self._rows.crop(count, states)
            self.crop_records(count)
            return self.jumped()
        if missing:
            row, n = missing[0]
            nearest, padding = storage_in(row).checkpoints.nearest(n), seen - len(row)
            why = None
            if again is None:
                why = "make the cache with model=, which then computes the others again, for a batch of one"
            elif len(rows) > 1:
                why = "take a batch of one, for which model= computes the others again"
            elif not again.knows(padding + nearest, seen) or not self._rows.pads_left():
                why = "give the model its tokens as input_ids, padded on the left if at all: the cache knows only such tokens"
            if why:
                raise MissingCheckpointError(
                    f"crop needs the states after {n} tokens, and the nearest checkpoint before is after {nearest}: crop to that, or {why}",
                    nearest,
                )
            self._rows.crop(count + n - nearest)
            self.load()
            again.run(cache, padding + nearest, padding + n, padding)
            return again.cut(padding + n)
        self._rows.crop(count)
        self.load()
        if again is not None:
            again.cut(self._rows.seen[0])

    def crop_records(self, count):
        """Let convolutions that record their states go back by `count` tokens, and forget the record."""
        for layer in self._layers.values():
            if layer.record_past:
                layer.crop(-count)

    def _has_recorded(self, count):
        """Whether all states are those of convolutions, which have recorded the last `count` tokens."""
        return all(
            layer.is_croppable
            and layer.record_past
            and all(one.shape[-1] - count >= layer.conv_kernel_size[i] for i, one in layer.conv_states.items() if one is not None)
            for layer in self._layers.values()
        )

    def select(self, indices):
        """Let the states of a batch be those of some of its rows."""
        for layer in self._layers.values():
            for states in (layer.conv_states, layer.recurrent_states):
                states.update({i: state[indices] for i, state in states.items() if state is not None})

    def _names(self):
        """The states that there are: layer, kind and number."""
        return [
            f"{index}.{kind}.{i}"
            for index, layer in self._layers.items()
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states))
            for i, state in states.items()
            if state is not None
        ]

    def _place(self, name):
        index, kind, i = name.split(".")
        layer = self._layers[int(index)]
        return layer, (layer.conv_states if kind == "conv" else layer.recurrent_states), int(i), kind

    def _state(self, name, count=0):
        """A state, or that of a convolution which records them `count` tokens ago."""
        layer, states, i, kind = self._place(name)
        if kind != "conv":
            return states[i]
        end = states[i].shape[-1] - count
        return states[i][..., end - layer.conv_kernel_size[i] : end]

    def _set(self, name, tensor):
        layer, states, i, kind = self._place(name)
        states[i], layer.has_previous_state[i] = tensor, True
        if kind == "conv":
            layer.is_conv_states_initialized[i], layer.conv_kernel_size[i] = True, tensor.shape[-1]
        else:
            layer.is_recurrent_states_initialized[i] = True
        layer.dtype, layer.device = tensor.dtype, tensor.device


def _array(tensor):
    """A tensor as an array of its own dtype."""
    tensor = tensor.detach().resolve_neg().contiguous()
    return tensor.view(torch.int16).numpy().view(bfloat16) if tensor.dtype is torch.bfloat16 else tensor.numpy()


def _tensor(array):
    """A copy of an array."""
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
