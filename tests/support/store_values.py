"""Keys and values for tests of stores."""

import contextlib

from kvfast.prompts.stores.troubles import Refusal


def key(number, kind="c"):
    return f"{kind}-{number:064x}"


def read(values):
    """Bytes of each value, None where there is none."""
    found = []
    for value in values:
        with value or contextlib.nullcontext():
            found.append(None if value is None else bytes(value.read(0, len(value))))
    return found


def taken(store, key, value):
    """Whether a store has room for a value."""
    try:
        return store.put(key, value)
    except Refusal:
        return False


def shown(error):
    """The texts of an error and of its causes."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error), repr(error.args)]
        error = error.__cause__ or error.__context__
    return " ".join(texts)
