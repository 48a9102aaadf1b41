"""Batches: sequences of one pool together, and the blocks of another scheduler."""
