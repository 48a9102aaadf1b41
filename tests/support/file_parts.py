"""Files of caches taken apart, changed, and put together again with digests that are right."""

import json

import numpy as np

from kvfast.files import cache_file


def parts(data):
    """The library's header as a dict, and the bytes of the tensors."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header, body):
    """The bytes of a file; the tensors start at a page."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % cache_file.ALIGNMENT)
    return len(text).to_bytes(8, "little") + text + body


def signed(header):
    """Give a header the digest of what it says."""
    metadata = header["__metadata__"]
    metadata["digest"] = cache_file._digest(metadata["kvfast"], metadata["checksums"])
    return header


def fields(data):
    """What kvfast has written into the header."""
    return json.loads(parts(data)[0]["__metadata__"]["kvfast"])


def with_text(data, text=None, checksums=None):
    """A file with another text in the place of kvfast's fields, or of the checksums."""
    header, body = parts(data)
    header["__metadata__"] |= {} if text is None else {"kvfast": text}
    header["__metadata__"] |= {} if checksums is None else {"checksums": checksums}
    return joined(signed(header), body)


def with_fields(data, **changes):
    """A file that says something else."""
    return with_text(data, json.dumps(fields(data) | changes))


def with_settings(data, **changes):
    return with_fields(data, settings=fields(data)["settings"] | changes)


def with_tensors(data, change):
    """A file whose tensors `change` has put its hand to, with checksums that are right."""
    header, body = parts(data)
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(body[start:end], np.uint8).reshape(entry["shape"])
    tensors = change(tensors)
    at, header, body = 0, {"__metadata__": header["__metadata__"]}, b""
    for name, array in tensors.items():
        dtype = {"|u1": "U8", "<f4": "F32", "|i1": "I8", "<i8": "I64"}[array.dtype.str]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        body += array.tobytes()
        at += array.nbytes
    import xxhash  # which a Python that has no wheel of it does not need until here

    sums = {name: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array)) for name, array in tensors.items()}
    header["__metadata__"]["checksums"] = json.dumps(sums)
    return joined(signed(header), body)
