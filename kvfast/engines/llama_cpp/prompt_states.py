"""States of a context of llama.cpp, cut into chunks and joined again. A chunk is a state of its own tokens."""

import numpy as np

from kvfast import CorruptFileError, IncompatibleSnapshotError
from kvfast.engines.llama_cpp.form import Reader


class WholeState:
    """The state that a context has given (``llama_state_get_data``), of which the first `num_tokens` tokens are needed."""

    def __init__(self, data, num_tokens):
        self.form, cells, self._parts = _read(data)
        order = np.argsort(cells[:, 0], kind="stable")[:num_tokens]
        if not np.array_equal(cells[order, 0], np.arange(num_tokens)) or cells[:, 2].any():
            raise IncompatibleSnapshotError(
                f"the cells of the state are not the positions 0 to {num_tokens - 1} of sequence 0: context was dropped or shifted"
            )
        self._order = None if np.array_equal(order, np.arange(num_tokens)) else order

    def write_chunk(self, payload, start, end):
        """Write the state of the tokens from `start` to `end` to a payload of ``form.nbytes(end - start)`` bytes."""
        cells = slice(start, end) if self._order is None else self._order[start:end]
        for target, source in zip(self.form.write(payload, end - start, start), self._parts):
            target[...] = source[:, cells]


class JoinedState:
    """The state of the first tokens of a prompt, made of chunks."""

    def __init__(self, form, num_tokens):
        self.form, self.num_tokens = form, num_tokens
        self.data, self._parts = form.new(num_tokens)

    def take_chunk(self, payload, start):
        """Copy a chunk, whose first token has the position `start`; CorruptFileError for another form or other positions. Threads may do
        so at once."""
        try:
            form, cells, parts = _read(payload)
        except IncompatibleSnapshotError as error:
            raise CorruptFileError(str(error)) from None
        end = start + len(cells)
        if form != self.form or not np.array_equal(cells[:, 0], np.arange(start, end)) or end > self.num_tokens:
            raise CorruptFileError("it is a state of another form")
        for target, source in zip(self._parts, parts):
            target[:, start:end] = source

    def first(self, num_tokens):
        """The state of the first tokens: this one, if they are all."""
        if num_tokens == self.num_tokens:
            return self
        other = JoinedState(self.form, num_tokens)
        for target, source in zip(other._parts, self._parts):
            target[...] = source[:, :num_tokens]
        return other


def form_of(payload):
    """The form of a chunk; CorruptFileError or IncompatibleSnapshotError."""
    return _read(payload)[0]


def _read(data):
    reader = Reader(data)
    reader.architecture()
    return reader.cache()
