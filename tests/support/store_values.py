"""Keys and values for tests of stores."""

import contextlib


def key(number, kind="c"):
    return f"{kind}-{number:064x}"


def read(values):
    """Bytes of each value, None where there is none."""
    found = []
    for value in values:
        with value or contextlib.nullcontext():
            found.append(None if value is None else bytes(value.read(0, len(value))))
    return found


def shown(error):
    """The texts of an error and of its causes."""
    texts = []
    while error is not None:
        texts += [str(error), repr(error), repr(error.args)]
        error = error.__cause__ or error.__context__
    return " ".join(texts)
