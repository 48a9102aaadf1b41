# cython: language_level=3, boundscheck=False, cdivision=True
"""The keyword arguments that every `attend` takes."""
from kvfast.core.checks cimport check_count, check_flag
from kvfast.core.kernels cimport UNSET, parse_precision
from kvfast.core.limits cimport KV_LANES

from kvfast.core.checks import check_size


cdef class Options:
    """All of them have defaults. `attend` passes them by position: by keyword they slow down a short call."""

    def __init__(self, out=None, scale=None, causal=True, softcap=None, sliding_window=None, num_sink_tokens=None,
                 sinks=None, alibi_slopes=None, return_lse=False, num_splits=0, num_threads=None, attention_chunk_size=None,
                 spans=None, clamp_spans=False, parents=None, chosen=None, chosen_run=1, precision=None):
        self.causal, self.return_lse = check_flag(causal, "causal"), check_flag(return_lse, "return_lse")
        self.out, self.scale, self.softcap = out, scale, softcap
        self.sliding_window, self.sinks, self.alibi_slopes = sliding_window, sinks, alibi_slopes
        self.num_sink_tokens = self.made_for = -1  # not given
        if num_sink_tokens is not None:
            self.num_sink_tokens = check_count(num_sink_tokens, "num_sink_tokens", 0)
        self.num_splits, self.num_threads = num_splits, num_threads
        self.spans, self.clamp_spans = spans, check_flag(clamp_spans, "clamp_spans")
        self.parents, self.chosen, self.chosen_run = parents, chosen, 1
        if parents is not None and not self.causal:
            raise ValueError("parents need causal=True and spans=None: a draft sees its ancestors alone")
        if spans is not None and not self.causal:
            raise ValueError("spans need causal=True, got causal=False, with which every query sees all keys")
        if type(chosen_run) is not int or chosen_run != 1:
            self.chosen_run = check_count(chosen_run, "chosen_run", 1)
            if self.chosen_run not in (1, KV_LANES) or (self.chosen_run > 1 and chosen is None):
                raise ValueError(f"chosen_run must be 1, or with chosen {KV_LANES}, got {self.chosen_run}")
        if chosen is not None and (parents is not None or alibi_slopes is not None):
            raise ValueError("chosen needs parents=None and alibi_slopes=None: a query sees chosen positions alone")
        self.precision = parse_precision(precision)
        self.attention_chunk_size = 0  # none
        if attention_chunk_size is not None:
            self.attention_chunk_size = check_count(attention_chunk_size, "attention_chunk_size", 1)
            if not self.causal:
                raise ValueError("attention_chunk_size needs causal=True, got causal=False")

    cdef void read_as(self, int precision) noexcept:
        """Take the precision of the cache, unless the call names one."""
        if self.precision == UNSET:
            self.precision = precision

    def window_or(self, window):
        """The sliding window of the call, or else `window`."""
        return window if self.sliding_window is None else check_size(self.sliding_window, "sliding_window", 1)

    def sinks_or(self, num_sink_tokens):
        """The number of sink tokens of the call, or else `num_sink_tokens`."""
        return num_sink_tokens if self.num_sink_tokens < 0 else self.num_sink_tokens
