"""A GGUF file: typed metadata, and tensors as float32 arrays."""

import os
import struct

import gguf
import numpy as np


class ModelFileError(ValueError):
    """The model file is damaged, is not GGUF, or holds a model this runtime does not know."""


# More than any model has. The reader makes several objects of each, of a file whose bytes may hold a hundred times as many.
MOST_KEYS, MOST_TENSORS, MOST_DIMS = 1 << 14, 1 << 16, 8
LEAST_KEY, LEAST_TENSOR = 13, 24  # bytes of a key with its value, and of what a file says of a tensor


class _BoundedReader(gguf.GGUFReader):
    """The `gguf` reader, which checks every count and length against the file before it reads what they count.

    The plain reader returns short or empty arrays past the end. With a damaged length field it then loops over elements that do not
    exist. It also makes objects of each element of an array; this one takes an array of numbers at once, and a view of each text.
    """

    def _build_fields(self, offs, count):
        self._check_count(count, MOST_KEYS, LEAST_KEY, "keys", offs)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs, count):
        self._check_count(count, MOST_TENSORS, LEAST_TENSOR, "tensors", offs)
        return super()._build_tensor_info(offs, count)

    def _get_tensor_info_field(self, orig_offs):
        (length,) = self._get(orig_offs, np.uint64)
        self._check_count(length, len(self.data), 1, "letters of a name", orig_offs)
        self._check_count(self._get(int(orig_offs) + 8 + int(length), np.uint32)[0], MOST_DIMS, 8, "dimensions of a tensor", orig_offs)
        return super()._get_tensor_info_field(orig_offs)

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item_type, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, start, total = gguf.GGUFValueType(item_type[0]), int(orig_offs) + 12, int(count[0])
        types = [gguf.GGUFValueType.ARRAY, kind][: 1 + (total > 0)]
        if kind == gguf.GGUFValueType.STRING:
            self._check_count(total, len(self.data), 8, "texts", start)
            texts, end = self._texts(start, total)
            return end - orig_offs, [item_type, count, *texts], list(range(2, 2 + total)), types
        if kind not in self.gguf_scalar_to_np:
            raise ValueError(f"an array must hold numbers or texts, got {kind.name}")
        values = self._get(start, self.gguf_scalar_to_np[kind], total)
        return start + values.nbytes - orig_offs, [item_type, count, values], [2] if total else [], types

    def _texts(self, at, count):
        """Views of texts one after another, and where they end."""
        data, texts = memoryview(self.data), []
        length_of = struct.Struct(("<" if self.endianess == gguf.GGUFEndian.LITTLE else ">") + "Q").unpack_from
        for _ in range(count):
            (length,) = length_of(data, at) if at + 8 <= len(data) else (len(data),)
            if length > len(data) - at - 8:
                raise ValueError(f"it ends at byte {len(data):,}, and a text from byte {at:,} on does not")
            texts.append(data[at + 8 : at + 8 + length])
            at += 8 + length
        return texts, at

    def _check_count(self, count, most, least_bytes, what, offset):
        if int(count) > most or int(count) * least_bytes > len(self.data) - int(offset):
            raise ValueError(
                f"it says that it has {int(count):,} {what}, and its {len(self.data):,} bytes have no room for them, or no model "
                f"has that many"
            )

    def _get(self, offset, dtype, count=1, override_order=None):
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data):,} and byte {end:,} is needed")
        return super()._get(offset, dtype, count, override_order)


class GGUFFile:
    """One open GGUF file, memory-mapped. Metadata is parsed at once; a tensor is read on request.

    `architecture` is `general.architecture`; model keys are spelled `<architecture>.<name>`. A file that is empty, truncated,
    damaged or not GGUF is a ModelFileError.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        if os.path.isdir(self.path):
            raise ModelFileError(f"{self.path} is a folder, not a GGUF file")
        with open(self.path, "rb") as file:  # a missing file raises its own OSError
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{self.path} is not a GGUF file: it does not start with GGUF")
        try:
            reader = _BoundedReader(self.path)
        except OSError:
            raise
        except Exception as error:  # with damaged bytes the parser may raise anything
            raise ModelFileError(f"{self.path} is damaged: {error}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.tensor_names = frozenset(self._tensors)
        self.architecture = self.text("general.architecture")

    def __contains__(self, key):
        """Whether the metadata has `key`."""
        return key in self._fields

    def keys(self, prefix):
        """The keys of the metadata that begin with `prefix`, sorted."""
        return sorted(key for key in self._fields if key.startswith(prefix))

    def get(self, key, default=None):
        """The metadata value of `key`: a number, a bool, a str or a list of one of them."""
        if key not in self._fields:
            return default
        try:
            return self._fields[key].contents()
        except ValueError as error:  # UnicodeDecodeError
            raise ModelFileError(f"{self.path} is damaged: {key}: {error}") from error

    def text(self, key, default=None):
        """The string metadata of `key`."""
        return self._typed(key, default, str, "a string")

    def items(self, key, kind, default=None):
        """The metadata list of `key`, whose items are all of the type `kind`."""
        value = self._typed(key, default, list, "a list")
        if not all(isinstance(item, kind) for item in value):
            raise ModelFileError(f"{self.path}: every item of {key} must be of type {kind.__name__}")
        return value

    def count(self, key, default=None):
        """The metadata of `key`, an integer of at least 1."""
        value = self._typed(key, default, int, "a whole number")
        if value < 1:
            raise ModelFileError(f"{self.path}: {key} must be at least 1, got {value}")
        return value

    def number(self, key, default=None):
        """The metadata of `key`, a number above 0."""
        value = float(self._typed(key, default, (int, float), "a number"))
        if not 0 < value < float("inf"):
            raise ModelFileError(f"{self.path}: {key} must be above 0, got {value}")
        return value

    def _typed(self, key, default, types, described):
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path}: the metadata lacks {key}")
        if not isinstance(value, types):
            raise ModelFileError(f"{self.path}: {key} must be {described}, got {value!r:.80}")
        return value

    def tensor(self, name, shape):
        """Read one tensor, whose shape, rows first, must be as expected: float32, C-contiguous.

        It is a dequantised copy, which stays valid after the file is gone.
        """
        if (stored := self.tensor_shape(name)) != shape:
            raise ModelFileError(f"{self.path}: {name} must have shape {shape}, got {stored}")
        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelFileError(f"{self.path}: {name} is stored as {kind}, which gguf cannot decode") from error
        if np.may_share_memory(values, tensor.data):  # float32 in the file: still the mapped bytes
            values = values.copy()
        return np.ascontiguousarray(values, dtype=np.float32).reshape(shape)

    def tensor_shape(self, name):
        """The shape of a tensor, rows first, without reading it."""
        if name not in self._tensors:
            raise ModelFileError(f"{self.path}: the tensor {name} is missing")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))  # GGUF names the fastest axis first

    def tensor_bytes(self):
        """Bytes that each tensor takes in the file, by name."""
        return {name: int(tensor.n_bytes) for name, tensor in self._tensors.items()}
