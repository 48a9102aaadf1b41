"""Documents that were computed apart, in any order; and texts longer than their cache."""

import numpy as np

import kvfast
from kvfast.tools.llama.model import whole_or_not


def compute_document(model, tokens, **storage):
    """Compute the keys and values of a document by itself, for `splice_documents`: a `kvfast.Snapshot` with the token ids.

    `storage` names the formats of the cache that it will be part of, as `kvfast.KVCache` does.
    """
    cache = kvfast.KVCache(*model.cache_shape, **storage)
    model.prefill(tokens, cache)
    return cache.snapshot(np.asarray(tokens))


def splice_documents(model, cache, documents, recompute=0):
    """Append documents, one after another, to the tokens of a cache.

    Parameters
    ----------
    model : LlamaModel
    cache : kvfast.KVCache or kvfast.Sequence
    documents : sequence of kvfast.Snapshot
        Of `compute_document`, with the formats of the cache.
    recompute : int
        Number of first tokens of each document to compute again, in their new place: these see all that comes before them.

    Raises
    ------
    ValueError
        If tokens are to be computed again, and a document does not have their ids.
    kvfast.CacheFullError, kvfast.IncompatibleSnapshotError
        As `KVCache.splice`. The cache then holds what it held.
    """
    if recompute < 0:
        raise ValueError(f"recompute must be at least 0, got {recompute}")
    if not recompute:
        cache.splice(*documents, rope=model.rope)
        return
    for document in documents:
        if document.token_ids is None:
            raise ValueError("recompute needs documents with token ids, see compute_document")
    with whole_or_not(cache):
        for document in documents:
            tokens = document.token_ids[:recompute]
            if len(tokens):
                model.prefill(tokens, cache)
            cache.splice(document, rope=model.rope, recomputed=len(tokens))


def shift_context(model, cache, keep):
    """Make room in a full cache: drop half of the tokens after the first `keep`, and return their number, at least 1.

    ValueError if there are none.
    """
    if not 0 <= keep < len(cache):
        raise ValueError(f"keep must be at least 0 and less than the {len(cache)} tokens of the cache, got {keep}")
    count = (len(cache) - keep + 1) // 2
    cache.drop(keep, keep + count, rope=model.rope)
    return count
