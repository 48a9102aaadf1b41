"""A cache outside the process: a header that describes it, and the bytes of its blocks."""

import json
from collections.abc import Mapping
from itertools import islice

import numpy as np

from kvfast.codec.calibration import layers_by_digest
from kvfast.core.checks import check_size, checked_token_ids
from kvfast.core.interchange import as_array
from kvfast.core.limits import MAX_TOKENS
from kvfast.errors import CorruptFileError, IncompatibleSnapshotError
from kvfast.files import block_bytes
from kvfast.files.fields import HEADER, check_fields, parsed
from kvfast.storage.kinds import storage_of
from kvfast.storage.sequences.checkpoints import Checkpoint, Checkpoints, StateForms
from kvfast.storage.settings import SIZED, check_sized, checked_settings

VERSION = 2


def json_of(value, **options):
    """JSON of settings, formats included."""
    return json.dumps(value, default=lambda form: form.to_dict(), **options)


def header_of(settings, storage, metadata, is_salted=False):
    """The header of a cache, as JSON. `is_salted`: its tokens are those of a sequence with a salt, which the file does not tell."""
    fields = {
        "version": VERSION,
        "settings": settings,
        "block_size": storage.block_size,
        "max_seq_len": storage.max_seq_len,
        "seq_len": storage.length,
        "tables": storage.resume_states(),
        "metadata": metadata,
    }
    if is_salted:
        fields["salted"] = True
    checkpoints = storage.checkpoints
    if checkpoints is not None and checkpoints.max_bytes is not None:
        fields["max_state_bytes"] = checkpoints.max_bytes
    if checkpoints is not None and checkpoints.held:
        fields |= {"states": checkpoints.forms.fields, "checkpoints": checkpoints.positions}
    return json_of(fields, separators=(",", ":"))


def named(layers):
    """Names for the results of `block_bytes.targets` and `block_bytes.arrays`, one after the other.

    ``layers.0.k.0``: the full blocks of a head, uint8 of shape (num_blocks, bytes of a block); ``layers.0.k.tail``: the blocks
    after them, block after block and head after head; ``layers.0.k.floats``: the pieces of float rows, in the same order. Numbers
    have as many digits as the largest, so that names sort in the order of the heads.
    """
    layer_digits = len(str(len(layers) - 1))
    for layer, pair in enumerate(layers):
        for side, (heads, tails, floats) in zip("kv", pair):
            start, head_digits = f"layers.{layer:0{layer_digits}}.{side}.", len(str(len(heads) - 1))
            for head, array in enumerate(heads):
                yield f"{start}{head:0{head_digits}}", array
            if len(tails):
                yield f"{start}tail", tails
            if len(floats):
                yield f"{start}floats", floats


def arrays_of(storage):
    """The stored bytes of a cache, by name."""
    found = named(block_bytes.arrays(storage))
    arrays = {name: array if isinstance(array, np.ndarray) else np.stack(array) for name, array in found}
    held = () if storage.checkpoints is None else storage.checkpoints.held.values()
    return arrays | dict(zip(_state_names(len(held)), [one.data.reshape(1, -1) for one in held]))


def _state_names(count):
    """Names of the bytes of checkpoints. They sort after those of `named`, whose arrays begin at a page of a file."""
    return [f"states.{i:0{len(str(count))}}" for i in range(count)]


class Opening:
    """A checked header, and the storage of the empty cache that it describes.

    `shapes` are those of the uint8 arrays that came with it, which are checked before anything is allocated. `max_seq_len` replaces
    that of the header; ValueError if the tokens do not fit it. `calibration`, one of its layers or None has the bases that formats
    name.
    """

    def __init__(self, text, shapes, max_seq_len=None, calibration=None):
        fields = _fields(text)
        settings, block_size, self.seq_len = fields["settings"], fields["block_size"], fields["seq_len"]
        self.metadata, self.tables, self.salt = fields["metadata"], fields["tables"], None if "salted" in fields else b""
        if max_seq_len is not None and check_size(max_seq_len, "max_seq_len", 1, MAX_TOKENS) < self.seq_len:
            raise ValueError(f"max_seq_len must be at least the {self.seq_len} tokens that are stored, got {max_seq_len}")
        layers = settings["num_layers"]
        if len(shapes) < 2 * layers:  # before anything is made for each layer: a number takes no bytes
            raise CorruptFileError(
                f"the header describes no cache: {layers} layers must have at least {2 * layers} arrays, got {len(shapes)}"
            )
        based = _with_bases(settings, layers_by_digest(calibration))
        try:
            # Without max_seq_len, so that nothing is reserved: a size from a file is not trusted for that.
            given = json.dumps(settings, sort_keys=True)
            self.settings = checked_settings(based)
            self.storage = storage_of(self.settings, block_size)
            places = block_bytes.places(self.storage, self.seq_len, self.tables)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise CorruptFileError(f"the header describes no cache: {error}") from None
        if json_of(self.settings, sort_keys=True) != given:
            raise CorruptFileError("the header describes no cache: its settings are not what kvfast writes")
        check_sized(settings, max_seq_len)
        self._max_state_bytes = fields.get("max_state_bytes")
        self._checkpoints = self._checked_checkpoints(fields.get("checkpoints", []), fields.get("states"))
        self._sides = self._checked_sides(places, self._without_states(shapes))
        self._reserve = max_seq_len
        self.storage.max_seq_len = fields["max_seq_len"] if max_seq_len is None else max_seq_len

    def _checked_checkpoints(self, positions, states):
        """The position and the forms of each checkpoint."""
        has_states, ascending = "has_states" in self.settings, sorted({one for one in positions if one <= self.seq_len})
        if (
            bool(positions) != (states is not None)
            or positions != ascending
            or (not has_states and (positions or self._max_state_bytes))
        ):
            raise CorruptFileError(f"the header describes no cache: one of {self.seq_len} tokens with {len(positions)} checkpoints")
        try:
            forms = StateForms(states or {})
        except ValueError as error:
            raise CorruptFileError(f"the header describes no cache: {error}") from None
        return [(one, forms) for one in positions]

    def _without_states(self, shapes):
        """The shapes of other arrays than checkpoints, whose own are checked."""
        others = dict(shapes)
        for name, (_, forms) in zip(_state_names(len(self._checkpoints)), self._checkpoints):
            shape = others.pop(name, None)
            if shape != (1, forms.nbytes):
                raise CorruptFileError(f"{name} must have shape {1, forms.nbytes}, got {shape}")
        return others

    def _take_states(self):
        """Give the storage its checkpoints, whose bytes are still to be written: the result is that of `take`."""
        if "has_states" not in self.settings:
            return []
        held = [(position, Checkpoint(forms, forms.empty(secure=False))) for position, forms in self._checkpoints]
        self.storage.checkpoints = Checkpoints(self._max_state_bytes, held)
        return [(name, [one.data.reshape(1, -1)], None) for name, (_, one) in zip(_state_names(len(held)), held)]

    def _checked_sides(self, places, shapes):
        """Check the shapes of all arrays. Returns the names of those with full blocks."""
        numbers = self._heads()
        count = sum(heads + (tails > 0) + (pieces > 0) for heads, pair in zip(numbers, places) for _, tails, _, pieces, _ in pair)
        if len(shapes) != count:
            heads = "/".join(map(str, dict.fromkeys(numbers)))
            raise CorruptFileError(f"{len(places)} layers of {heads} heads must have {count} arrays, got {len(shapes)}")
        expected = [
            [
                ([(full, nbytes)] * heads, [(tails * heads, nbytes)] * (tails > 0), [(pieces * heads, rest)] * (pieces > 0))
                for full, tails, nbytes, pieces, rest in pair
            ]
            for heads, pair in zip(numbers, places)
        ]
        whole = []
        for name, shape in named(expected):
            if isinstance(shape, list):
                (shape,) = shape
            else:
                whole.append(name)
            if name not in shapes:
                raise CorruptFileError(f"{name} is missing")
            if shapes[name] != shape:
                raise CorruptFileError(f"{name} must have shape {shape}, got {shapes[name]}")
        return whole

    def _heads(self):
        """KV heads of each layer."""
        return [self.storage.shape(layer)[0] for layer in range(self.storage.num_layers)]

    def take(self):
        """Allocate the blocks of the cache.

        Yields the name of each array, the rows that its bytes are written to, and a check of what is written: StoredFloats or
        None.
        """
        if self._reserve is not None:
            self.storage = storage_of(self.settings, self.storage.block_size, self._reserve)
        block_bytes.reopen(self.storage, self.seq_len, self.tables)
        for name, array in named(block_bytes.targets(self.storage)):
            yield name, [array] if isinstance(array, np.ndarray) else array, self._floats_of(name)
        yield from self._take_states()

    def _floats_of(self, name):
        _, layer, side, kind = name.split(".")
        return block_bytes.floats_of(self.storage, int(layer), side == "v", kind == "floats")

    def take_mapped(self, memory, offsets):
        """Use writable memory as the full blocks of the cache; `offsets` has the start of each array in it.

        Yields as `take`, for the blocks that are not full, for float rows and for states.
        """
        storage, names, sides = self.storage, iter(self._sides), []
        for heads in np.repeat(self._heads(), 2).tolist():  # keys and values
            starts = np.array([offsets[name] for name in islice(names, heads)], np.int64)
            strides = np.diff(starts) if heads > 1 else np.zeros(1, np.int64)
            if np.any(starts % 64) or np.any(strides != strides[0]):
                raise CorruptFileError(
                    "the blocks are not where kvfast writes them and cannot be mapped (did something "
                    "else write the file?); load it without mmap"
                )
            sides.append((int(starts[0]), int(strides[0])))
        block_bytes.reopen(storage, self.seq_len, self.tables, memory, list(zip(sides[::2], sides[1::2])), self._reserve or 0)
        for name, array in named(block_bytes.targets(storage)):
            if not isinstance(array, np.ndarray):
                yield name, array, self._floats_of(name)
        yield from self._take_states()


def _fields(text):
    """The header as a dict whose fields are right, each by itself. `checked_settings` checks the rest."""
    try:
        fields = parsed(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header is not JSON: {error}") from None
    if not isinstance(fields, dict) or type(fields.get("version")) is not int or fields["version"] < 0:
        raise CorruptFileError("the header is not a kvfast header of a cache (CompressedKV.load reads compressed keys and values)")
    if fields["version"] != VERSION:
        raise IncompatibleSnapshotError(f"the format has version {fields['version']}; this kvfast reads version {VERSION}")
    try:
        check_fields(fields, HEADER, "header")
    except CorruptFileError as error:
        raise CorruptFileError(f"the header describes no cache: {error}") from None
    most, kind = fields["max_seq_len"], fields["settings"]["kind"]
    if most is not None and (kind not in SIZED or fields["seq_len"] > most):
        raise CorruptFileError(
            f"the header describes no cache: one of kind {kind} with {fields['seq_len']} tokens and a max_seq_len of {most}"
        )
    return fields


def _with_bases(settings, bases):
    """The settings of a header, with the layers of a calibration in place of their digests."""
    formats = []
    for layer, form in enumerate(settings.get("dtype", ())):
        digest = form.get("calibration")
        if digest is not None and digest not in bases:
            given = "; the one that was passed has no such layer" if bases else ""
            raise IncompatibleSnapshotError(
                f"the keys of layer {layer} are in a basis with the digest {digest}: pass the calibration that has it, "
                f"calibration=kvfast.Calibration.load(path){given}"
            )
        formats.append(form if digest is None else form | {"calibration": bases[digest]})
    return settings | {"dtype": formats} if formats else settings


def to_arrays(settings, storage, token_ids, metadata, is_salted):
    """`Snapshot.state_dict`; see `header_of`."""
    arrays = {"header": np.frombuffer(header_of(settings, storage, metadata, is_salted).encode(), np.uint8)}
    if token_ids is not None:
        arrays["token_ids"] = token_ids.copy()
    return arrays | {name: array.copy() for name, array in arrays_of(storage).items()}


def checked_arrays(arrays):
    """A mapping of names to arrays, as a new dict."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"state must be a mapping of names to arrays, got {type(arrays).__name__}")
    return {name: as_array(array, name) for name, array in arrays.items()}


def from_arrays(arrays, calibration=None):
    """`Snapshot.from_state_dict`: the arguments of a Snapshot."""
    arrays = checked_arrays(arrays)
    token_ids = arrays.pop("token_ids", None)
    header = arrays.pop("header", None)
    if header is None:
        raise CorruptFileError("header is missing")
    for name, array in [("header", header), *arrays.items()]:
        if array.dtype != np.uint8:
            raise CorruptFileError(f"{name} must be uint8, got {array.dtype}")
    shapes = {name: array.shape for name, array in arrays.items()}
    opening = Opening(header.tobytes().decode(errors="replace"), shapes, calibration=calibration)
    if token_ids is not None:
        try:
            token_ids = checked_token_ids(token_ids, opening.seq_len)
        except ValueError as error:
            raise CorruptFileError(str(error)) from None
    for name, rows, check in opening.take():
        for row, source in zip(rows, [arrays[name]] if len(rows) == 1 and rows[0].ndim == 2 else arrays[name]):
            row[...] = source
            try:
                if check is not None:
                    check(row)
            except CorruptFileError as error:
                raise CorruptFileError(f"{name} cannot be used: {error}") from None
    return opening.settings, opening.storage, token_ids, opening.metadata, opening.salt
