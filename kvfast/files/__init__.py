"""The bytes of a sequence outside the process.

- state: a cache as a header and arrays
- fields: the type and the range of each field of a header
- block_bytes, chunk_bytes: blocks and float rows as bytes, of a sequence and of a shared prefix
- cache_file: safetensors with checksums
- encryption: keys and ciphers of files and of stores
"""
