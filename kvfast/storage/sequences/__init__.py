"""Sequences: all layers of one text, of its heads, or of its spliced segments."""
