"""The rotation of a ring that rotates queries and keys itself."""

import numpy as np

from kvfast.codec.projection import Transform, rotated
from kvfast.codec.rope import RotaryTables
from kvfast.core.checks import check_size
from kvfast.core.interchange import as_array


class RingRope:
    """Rotates keys for their absolute positions, and queries for these and for the sink tokens directly before the window."""

    __slots__ = ("_interleaved", "_num_sink_tokens", "_tables", "_windows")

    UNMOVABLE = "a ring with a rope has rotated each key for its row"

    def __init__(self, settings):
        frequencies, self._interleaved = settings["rope"]["frequencies"], settings["rope"]["interleaved"]
        self._tables = RotaryTables(frequencies)
        self._windows, self._num_sink_tokens = settings["windows"], settings["num_sink_tokens"]

    def of_keys(self, storage, layer, array, norm=None, eps=0.0):
        """The Transform of the next keys of a layer, those of `array`."""
        num_tokens, length = _num_tokens(array), storage.layer_length(layer)
        cos, sin = self._tables(length, num_tokens)
        positions = np.arange(num_tokens)
        return Transform(storage.shape(layer)[1], norm, eps, cos, sin, positions, self._interleaved, "k_norm", made_for=length)

    def of_queries(self, storage, layer, q, options):
        """Queries for the window, queries for the sink tokens, or None if they are the same, and the layer length that they were made for."""
        n, length = _num_tokens(q), storage.layer_length(layer)
        window = self.checked_window(layer, options)
        first = max(0, length - n)
        at_window = rotated(q, *self._tables(first, n), self._interleaved)
        num_sink_tokens = options.get("num_sink_tokens")
        num_sink_tokens = self._num_sink_tokens if num_sink_tokens is None else check_size(num_sink_tokens, "num_sink_tokens", 0)
        if window is None or not num_sink_tokens or length <= window:
            return at_window, None, length
        # The last position in a cache that holds the sink tokens and the window up to the query.
        return at_window, rotated(q, *self._tables(first, n, num_sink_tokens + window - 1), self._interleaved), length

    def checked_window(self, layer, options):
        """The window of a call; ValueError for what a ring cannot show whose rows were rotated."""
        if options.get("attention_chunk_size") is not None:
            raise ValueError("attention_chunk_size must be None in a ring with a rope, whose windows move with the queries")
        if options.get("tree_parents") is not None:
            raise ValueError("tree_parents must be None in a ring with a rope, which has rotated each draft for its row")
        window = options.get("sliding_window")
        window = self._windows[layer] if window is None else check_size(window, "sliding_window", 1)
        if options.get("spans") is not None and window is not None and not options.get("clamp_spans"):
            _check_spans(options["spans"], window)
        return window


def _num_tokens(array):
    """Rows of an array, at least 1: what has no rows, or is not an array, is refused later, in `open_rows`."""
    try:
        shape = np.shape(array)
    except ValueError:
        return 1
    return max(1, shape[0]) if shape else 1


def _check_spans(spans, window):
    """Refuse spans that reach before the window of a query, whose sink tokens lie directly before it. Other wrong spans are told later."""
    spans = as_array(spans, "spans")
    longest = int(np.diff(spans).max()) if spans.ndim == 2 and spans.shape[1] == 2 and spans.dtype.kind in "iu" and len(spans) else 0
    if longest > window:
        raise ValueError(
            f"spans must not be longer than the window of {window} tokens in a ring with a rope, whose sink tokens lie directly before the window, "
            f"got {longest}: pass clamp_spans=True"
        )
