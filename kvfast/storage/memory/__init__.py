"""Blocks: their memory, the float rows of their tokens, and the known ones; and who may enter."""
