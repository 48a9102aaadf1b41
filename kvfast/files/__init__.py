"""The bytes of a sequence outside the process: as arrays (`block_bytes`, `state`) and as a file (`cache_file`)."""
