"""The fields of the header of compressed keys and values, for each method."""

from __future__ import annotations

from kvfast.core.limits import MAX_CENTROIDS, MAX_HEAD_DIM, MAX_TOKENS
from kvfast.errors import CorruptFileError
from kvfast.files.fields import HEAD_DIM, NULL, NUMBER, STRING, TOKENS, Kind, check_fields, exactly, fields, integer, list_of, text

VERSION = 2

_SIZE = integer(1, MAX_TOKENS)
_HEADS = list_of(list_of(integer(0, MAX_TOKENS), 1, MAX_TOKENS), 1, MAX_TOKENS)
_BITS = Kind("8 or 4", lambda value: type(value) is int and value in (8, 4)) | NULL
_OF_RANKS = fields(heads=_HEADS, ranks=list_of(HEAD_DIM, 1, MAX_TOKENS), basis=text("float16|float32", "float16 or float32"))
_METHODS = {
    "LowRank": {"rank": HEAD_DIM | NULL, "energy": NUMBER | NULL, "dtype": STRING},
    "Hybrid": {"rank": HEAD_DIM | NULL, "quant_bits": _BITS},
    "VectorQuantization": {"codebook_size": integer(2, MAX_CENTROIDS), "num_subvectors": HEAD_DIM | NULL, "seed": integer(0, 1 << 62)},
    "Quantize": {"bits": _BITS | STRING},
}
_STORES = {
    "LowRank": _OF_RANKS,
    "Hybrid": _OF_RANKS,
    "Quantize": fields(),
    "VectorQuantization": fields(subvectors=integer(1, MAX_HEAD_DIM), count=integer(2, MAX_CENTROIDS)),
}
COMPRESSED = {
    name: fields(
        compressed=exactly(VERSION),
        method=fields(name=exactly(name), **of_method),
        error=list_of(NUMBER, 2, 2),
        layout=fields(num_heads=_SIZE, seq_len=_SIZE, head_dim=HEAD_DIM, batch=_SIZE | NULL),
        parts=list_of(fields(num_exact=TOKENS, store=_STORES[name]), 1, MAX_TOKENS),
    )
    for name, of_method in _METHODS.items()
}


def check_header(header: dict) -> None:
    """Raise CorruptFileError unless each field is right by itself."""
    method = header.get("method")
    name = method.get("name") if type(method) is dict else None
    try:
        if type(name) is not str or name not in COMPRESSED:
            raise CorruptFileError(f"header.method must have the name {', '.join(COMPRESSED)}")
        check_fields(header, COMPRESSED[name], "header")
    except CorruptFileError as error:
        raise CorruptFileError(f"the header describes no compressed keys and values: {error}") from None
