"""One token to bytes and back. Knows no sequence.

- dtypes, formats, blocks: storage dtypes, `KVFormat` and the presets, the layout of a block
- encode, seal, decode: rows to codes and their scales, full blocks with channel scales, codes to floats
- stored_floats: checks of floats from outside the process
- projection, rope, calibration: fused projections, rotary embedding, bases that fit a model
- quantize: `quantize` and `dequantize` of plain arrays
- multi_head: the format of a `MultiHeadKVCache`
"""
