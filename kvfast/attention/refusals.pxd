"""Why a call is refused, for Python and for C: the text stands where the check is, and `request.raise_refusal` makes the error."""


cdef enum kv_error:
    VALUE                      # ValueError
    DIMENSION                  # DimensionMismatchError
    NOT_FINITE                 # NonFiniteInputError
    BAD_QUERIES                # likewise, for queries: the error says where
    MEMORY                     # MemoryError


ctypedef struct kv_refusal:
    kv_error error
    const char *text           # of str.format, see `raise_refusal`
    Py_ssize_t numbers[6]      # ``{0}`` to ``{5}``
    double value               # ``{value}``
    Py_ssize_t member          # of a batch, or -1


cdef inline bint refuse(kv_refusal *refusal, kv_error error, const char *text, Py_ssize_t a=0, Py_ssize_t b=0, Py_ssize_t c=0,
                        Py_ssize_t d=0, Py_ssize_t e=0, Py_ssize_t f=0) noexcept nogil:
    """Note a refusal. Returns False, which functions that refuse return."""
    refusal.error, refusal.text, refusal.member = error, text, -1
    refusal.numbers[0], refusal.numbers[1], refusal.numbers[2] = a, b, c
    refusal.numbers[3], refusal.numbers[4], refusal.numbers[5] = d, e, f
    return False


cdef inline bint no_memory(kv_refusal *refusal) noexcept nogil:
    return refuse(refusal, MEMORY, b"cannot allocate the working memory of a call of attend")
