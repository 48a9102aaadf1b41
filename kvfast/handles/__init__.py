"""What the pointers of `kvfast.h` point to.

- header: the types of `kvfast.h`, for Cython
- arguments: rows and options of C, checked
- handle: what both kinds share: working memory, who may enter, the last error
- cache_handle, pool_handle: a `kvfast_cache`: one cache or sequence; a `kvfast_pool`: batches over sequences
- tensor_calls: a pool with tensors of other libraries, for operators
"""
