"""What the pointers of ``kvfast.h`` point to.

From the bottom up::

    header          the types of ``kvfast.h`` for Cython
    arguments       rows and options of C, as those of attention and storage, or as an error that tells what is wrong with them
    handle          what both kinds share: working memory, who may enter, the text of the last error
    cache_handle    a `kvfast_cache`: one cache or sequence
    pool_handle     a `kvfast_pool`: batches over sequences
"""
