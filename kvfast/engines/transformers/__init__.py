"""The cache and the attention function for transformers. Public names are in `kvfast.transformers`.

versions, spans -> masks, received -> rows -> attention -> layers -> cache -> trial
                                              attention -> static
"""
