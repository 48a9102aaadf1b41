"""States of a context of llama.cpp, cut into chunks and joined again. A chunk is a state of its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvfast import CorruptFileError, IncompatibleSnapshotError
from kvfast.engines.llama_cpp.form import Form, Reader


@dataclass(frozen=True)
class Forms:
    """The form of a state of several caches, one after another: those of a model with windows, or the one of a hybrid, of whose
    recurrent states the rest of a state is."""

    head: bytes
    caches: tuple[Form, ...]

    def nbytes(self, num_tokens):
        """Bytes of the state of `num_tokens` tokens, without recurrent states."""
        return len(self.head) + sum(form.nbytes(num_tokens) for form in self.caches)

    def write(self, data, num_tokens, start=0):
        """As `Form.write`, for all caches."""
        data, at, parts = memoryview(data), len(self.head), []
        data[:at] = self.head
        for form in self.caches:
            parts += form.write(data[at:], num_tokens, start)
            at += form.nbytes(num_tokens)
        return parts


class WholeState:
    """The state that a context has given (``llama_state_get_data``), of which the tokens from `first` to `last` are needed. Its last
    `states_nbytes` bytes are recurrent states."""

    def __init__(self, data, first, last, states_nbytes=0):
        self.forms, cells, self._parts = _read(memoryview(data)[: len(data) - states_nbytes])
        self._first, orders = first, [_order(one, first, last) for one in cells]
        self._orders = [one for one, form in zip(orders, self.forms.caches) for _ in (*form.keys, *form.values)]

    def write_chunk(self, payload, start, end):
        """Write the state of the tokens from `start` to `end` to a payload of ``forms.nbytes(end - start)`` bytes."""
        cells = slice(start - self._first, end - self._first)
        for target, source, order in zip(self.forms.write(payload, end - start, start), self._parts, self._orders):
            target[...] = source[:, cells if order is None else order[cells]]


class JoinedState:
    """The state of the first tokens of a prompt, made of chunks."""

    def __init__(self, forms, num_tokens, states=b""):
        self.forms, self.num_tokens = forms, num_tokens
        self.data = bytearray(forms.nbytes(num_tokens)) + states
        self._parts = forms.write(self.data, num_tokens)

    def take_chunk(self, payload, start):
        """Copy a chunk, whose first token has the position `start`; CorruptFileError for another form or other positions. Threads may do
        so at once."""
        try:
            forms, cells, parts = _read(payload)
        except IncompatibleSnapshotError as error:
            raise CorruptFileError(str(error)) from None
        end = start + (len(cells[0]) if cells else 0)
        if forms != self.forms or any(not np.array_equal(one[:, 0], np.arange(start, end)) for one in cells) or end > self.num_tokens:
            raise CorruptFileError("it is a state of another form")
        for target, source in zip(self._parts, parts):
            target[:, start:end] = source

    def first(self, num_tokens):
        """The state of the first tokens: this one, if they are all."""
        if num_tokens == self.num_tokens:
            return self
        other = JoinedState(self.forms, num_tokens)
        for target, source in zip(other._parts, self._parts):
            target[...] = source[:, :num_tokens]
        return other


def forms_of(payload):
    """The forms of a chunk; CorruptFileError or IncompatibleSnapshotError."""
    return _read(payload)[0]


def _read(data):
    """Forms, the cells of each cache, and the parts of all."""
    reader, caches = Reader(data), []
    reader.architecture()
    head = reader.head()
    while reader.at != len(reader.data):
        caches.append(reader.cache())
    forms, cells, parts = zip(*caches) if caches else ((), (), ())
    return Forms(head, forms), cells, [part for some in parts for part in some]


def _order(cells, first, last):
    """The cells of the tokens, or None if they are the first ones, in order."""
    order = np.argsort(cells[:, 0], kind="stable")[: last - first]
    if not np.array_equal(cells[order, 0], np.arange(first, last)) or cells[:, 2].any():
        raise IncompatibleSnapshotError(
            f"the cells of the state are not the positions {first} to {last - 1} of sequence 0: context was dropped or shifted"
        )
    return None if np.array_equal(order, np.arange(last - first)) else order
