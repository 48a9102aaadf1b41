"""The face of the package: few names, which change on purpose."""

import kvfast

NAMES = {
    "caches": "KVCache RingKVCache PagedKVCache Sequence MLAKVCache PagedMLAKVCache MultiHeadKVCache Rope",
    "formats": "KVFormat PRESETS Calibration calibrate fidelity choose_format",
    "kept": "Snapshot load PromptCache",
    "compression": "KVCacheCompressor CompressedKV PrefixKVCache LowRank Hybrid VectorQuantization Quantize",
    "arrays": "attention merge_states split_qkv_norm_rope quantize dequantize",
    "machine": "plan config show_config get_num_threads set_num_threads active_isa available_isas use_isa get_include",
    "errors": "CacheFullError CorruptFileError DimensionMismatchError IncompatibleSnapshotError MissingCheckpointError NonFiniteInputError StoreError",
}
# What users of other caches know these by.
KNOWN = {
    "KVCache": "append advance attend k v truncate clear copy entry_size write snapshot restore save",
    "MultiHeadKVCache": "push_token attention_scores attend",
    "KVCacheCompressor": "compress_kv compress_kv_3d decompress_kv decompress_kv_3d compress_cache decompress_to_cache",
}


def test_public_names():
    assert kvfast.__all__ == " ".join(NAMES.values()).split()
    assert len(set(kvfast.__all__)) == len(kvfast.__all__) <= 45


def test_names_that_users_know():
    for name, members in KNOWN.items():
        assert set(members.split()) <= set(dir(getattr(kvfast, name)))
