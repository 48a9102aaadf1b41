"""Operators of PyTorch. Public names are in `kvfast.torch`.

pools -> operators
"""
