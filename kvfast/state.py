"""What a cache is outside the process: a header that describes it, and the bytes of its blocks."""

import json

import numpy as np

from .errors import CorruptFileError, IncompatibleSnapshotError
from .plan import check_size

# The class of each kind of cache; the modules of the classes enter them.
KINDS = {}
VERSION = 1
MOST_TOKENS = 1 << 40

_FIELDS = {"version", "settings", "block_size", "max_seq_len", "seq_len", "tables", "metadata"}


def header_of(cache, metadata):
    """All that a file tells of a cache but its bytes and its token ids.

    Returns
    -------
    str
        JSON.
    """
    fields = {
        "version": VERSION,
        "settings": cache._settings(),
        "block_size": cache.block_size,
        "max_seq_len": cache.max_seq_len,
        "seq_len": len(cache),
        "tables": cache._buffer.places_of_tables(),
        "metadata": metadata,
    }
    return json.dumps(fields, separators=(",", ":"))


def sides_of(buffer):
    """(name, array) of each layer's keys and values: uint8 of shape (num_kv_heads, num_blocks, bytes of a block)."""
    for layer in range(buffer.num_layers):
        yield f"layers.{layer}.k", buffer.side(layer, False)
        yield f"layers.{layer}.v", buffer.side(layer, True)


class Opening:
    """A header that was found good, and the empty cache of it.

    Parameters
    ----------
    text : str
        The JSON.
    shapes : dict of str to tuple
        Shapes of the uint8 arrays that came with it; nothing is allocated before they are found to be right.
    max_seq_len : int, optional
        Instead of what the header says.

    Raises
    ------
    CorruptFileError, IncompatibleSnapshotError
    ValueError
        If the tokens do not fit `max_seq_len`.
    """

    def __init__(self, text, shapes, max_seq_len=None):
        fields = _fields(text)
        settings, block_size, self.seq_len = fields["settings"], fields["block_size"], fields["seq_len"]
        self.metadata, self.tables = fields["metadata"], fields["tables"]
        if max_seq_len is not None and check_size(max_seq_len, "max_seq_len", 1, MOST_TOKENS) < self.seq_len:
            raise ValueError(f"max_seq_len must be at least the {self.seq_len} tokens that are stored, got {max_seq_len}")
        if len(shapes) != 2 * settings["num_layers"]:
            raise CorruptFileError(f"{settings['num_layers']} layers have {2 * settings['num_layers']} arrays, got {len(shapes)}")
        try:
            # Without max_seq_len nothing is reserved: a file's word is not enough for that.
            self.cache = KINDS[settings.pop("kind")]._from_settings(settings, block_size, None)
            expected = self.cache._buffer.shapes(self.seq_len, self.tables)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise CorruptFileError(f"the header describes no cache: {error}") from None
        for layer, of_layer in enumerate(expected):
            for side, shape in zip("kv", of_layer):
                name = f"layers.{layer}.{side}"
                if name not in shapes:
                    raise CorruptFileError(f"{name} is missing")
                if shapes[name] != shape:
                    raise CorruptFileError(f"{name} must have shape {shape}, got {shapes[name]}")
        self._reserved = None
        if max_seq_len is not None:
            self._reserved = type(self.cache)._from_settings(settings, block_size, max_seq_len)
        self.cache._buffer.max_seq_len = max_seq_len or fields["max_seq_len"]

    def take(self, memory=None, offsets=None):
        """Give the cache its blocks.

        Parameters
        ----------
        memory : buffer, optional
            Writable bytes that are the blocks already.
        offsets : dict of str to int
            Where in `memory` each array starts.

        Returns
        -------
        list of (str, ndarray)
            The arrays, for their bytes to be put in.
        """
        if memory is None and self._reserved is not None:
            self.cache = self._reserved
        buffer = self.cache._buffer
        if memory is not None:
            offsets = [(offsets[f"layers.{i}.k"], offsets[f"layers.{i}.v"]) for i in range(buffer.num_layers)]
        buffer.reopen(self.seq_len, self.tables, memory, offsets)
        return list(sides_of(buffer))


def _fields(text):
    """The header as a dict whose values have the right types; the cache's own classes check the rest."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header is not JSON: {error}") from None
    if not isinstance(fields, dict) or not _is_count(fields.get("version")):
        raise CorruptFileError("the header is not one of kvfast")
    if fields["version"] != VERSION:
        raise IncompatibleSnapshotError(f"the format has version {fields['version']}; this kvfast reads version {VERSION}")
    good = (
        fields.keys() == _FIELDS
        and isinstance(fields["settings"], dict)
        and fields["settings"].get("kind") in KINDS
        and _is_count(fields["settings"].get("num_layers"))
        and _is_count(fields["block_size"])
        and (fields["max_seq_len"] is None or _is_count(fields["max_seq_len"]))
        and _is_count(fields["seq_len"])
        and fields["seq_len"] <= (MOST_TOKENS if fields["max_seq_len"] is None else fields["max_seq_len"]) <= MOST_TOKENS
        and isinstance(fields["tables"], list)
        and all(isinstance(place, dict) for place in fields["tables"])
        and isinstance(fields["metadata"], dict)
        and all(isinstance(value, str) for value in fields["metadata"].values())
    )
    if not good:
        raise CorruptFileError(f"the header describes no cache: {text[:200]}")
    return fields


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def to_arrays(cache, token_ids, metadata):
    """`Snapshot.state_dict`."""
    arrays = {"header": np.frombuffer(header_of(cache, metadata).encode(), np.uint8)}
    if token_ids is not None:
        arrays["token_ids"] = token_ids
    return arrays | dict(sides_of(cache._buffer.copy(dense=True)))


def from_arrays(arrays):
    """`Snapshot.from_state_dict`: the arguments of a Snapshot."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    token_ids = arrays.pop("token_ids", None)
    header = arrays.pop("header", None)
    if header is None:
        raise CorruptFileError("header is missing")
    for name, array in [("header", header), *arrays.items()]:
        if array.dtype != np.uint8:
            raise CorruptFileError(f"{name} must be uint8, got {array.dtype}")
    opening = Opening(header.tobytes().decode(errors="replace"), {name: array.shape for name, array in arrays.items()})
    if token_ids is not None and (token_ids.shape != (opening.seq_len,) or token_ids.dtype.kind not in "iu"):
        raise CorruptFileError(f"token_ids must be {opening.seq_len} integers, got {token_ids.dtype} of shape {token_ids.shape}")
    for name, side in opening.take():
        side[...] = arrays[name]
    return opening.cache, token_ids, opening.metadata
