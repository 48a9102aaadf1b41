"""Recognises what a matrix shows each query: a causal range, and spans whose tokens see each other."""

import numpy as np


class UnknownMaskError(ValueError):
    """A mask that shows a query something else; its text names the query."""


def recognise(blocks, kept, window, chunk, first=0):
    """The spans of a mask, with which `attend` computes the same: options of it for each row, in positions of the row.

    UnknownMaskError if there are none. `blocks` are the mask of the last tokens, some queries after the others, bool of shape
    (batch, queries, tokens). `kept` is False for padding, which rows do not store: (batch, tokens). `first` is the first token,
    padding included, that the layer still has.
    """
    seen = [np.concatenate(parts, axis=1) for parts in zip(*(_ranges(block, kept, first) for block in blocks))]
    return [_options_of(row, *ranges, window, chunk) for row, *ranges in zip(range(len(kept)), kept, *seen)]


def _ranges(block, kept, held):
    """First and last token that each query sees among those that are kept, plus one, and how many there are: shape (batch, queries)."""
    first, stop, count = (np.zeros(block.shape[:2], np.int64) for _ in range(3))
    for row, seen in enumerate(block):
        length, gone = kept[row].sum(), kept[row, :held].sum()
        seen = seen[:, held:] if kept[row].all() else seen[:, held:][:, kept[row, held:]]
        if length > gone:
            count[row] = np.count_nonzero(seen, axis=1)
            first[row], stop[row] = gone + seen.argmax(1), length - seen[:, ::-1].argmax(1)
    return first, stop, count


def _options_of(row, kept, first, stop, count, window, chunk):
    """The options of one row of the batch."""
    length, queries = int(kept.sum()), np.arange(len(kept) - len(first), len(kept))
    at = kept.cumsum()[queries] - 1  # position of each query; that of padding is the token before it
    stored = kept[queries]
    behind = ~stored & (at == length - 1) & (count > 0)  # padding after the last token sees all of them; other padding is not read
    read = stored | behind
    number, first, stop, count, at, stored = (one[read] for one in (queries, first, stop, count, at, stored))
    begin = np.zeros_like(at)
    if window:
        begin = np.maximum(begin, at + 1 - window)
    if chunk:
        begin = np.maximum(begin, at // chunk * chunk)
    starts, stops = _spans(at, begin, first, stop, stored)
    span = np.searchsorted(starts, at, side="right") - 1  # the last one that begins up to a query; the last element stands for none
    span_start, span_stop = np.append(starts, 0)[span], np.append(stops, 0)[span]
    within = stored & (at < span_stop)
    ends = np.where(within, span_stop, at + 1)
    for clamp, expected in ((False, np.where(within, np.minimum(begin, span_start), begin)), (True, begin)):
        wrong = (first != expected) | (stop != ends) | (count != ends - expected)
        if not wrong.any():
            return {} if not len(starts) else {"spans": np.stack((starts, stops), 1), "clamp_spans": clamp}
    at = int(wrong.argmax())
    what = f"{count[at]} tokens from {first[at]} to {stop[at] - 1}" if count[at] else "nothing"
    raise UnknownMaskError(f"token {number[at]} of row {row} sees {what}")


def _spans(at, begin, first, stop, stored):
    """Starts and stops of the spans of queries that see more than a causal range from `begin` on."""
    more = stored & ((stop > at + 1) | (first < begin))
    stops, where = np.unique(stop[more], return_index=True)
    starts = at[more][where]
    if len(stops):  # those that see tokens before their window see them from the start of their span on
        earliest = np.full(len(stops), np.iinfo(np.int64).max)
        early = more & (first < begin)
        np.minimum.at(earliest, np.searchsorted(stops, stop[early]), first[early])
        starts = np.minimum(starts, earliest)
    apart = starts[1:] >= stops[:-1]
    return (starts, stops) if apart.all() else (starts[:0], stops[:0])
