"""One token to bytes and back.

What is stored of a token (`formats`), the layout of a block (`blocks`), rows into blocks (`encode`), blocks that are
encoded as a whole (`seal`), and the way from a fused projection to rows (`projection`, `rope`). Knows no sequence.
"""
