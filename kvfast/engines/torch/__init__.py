"""Operators of PyTorch. Public names are in `kvfast.torch`.

- operators: `append` and `attend` on a tensor of blocks
- pools: the pool over such a tensor
"""
