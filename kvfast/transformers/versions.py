"""Which transformers this adapter knows."""

import importlib.metadata

# The first version whose caches pass sizes to masks as this adapter does, and the first that may do otherwise.
FIRST, BEYOND = (5, 24), (6, 0)


def check_versions():
    """Refuse to be imported with a transformers that works in another way.

    Raises
    ------
    ImportError
        Naming what is missing or of another version, and how to get it.
    """
    for name in ("torch", "transformers"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ModuleNotFoundError(f'kvfast.transformers needs {name}: pip install "kvfast[transformers]"', name=name) from None
    check_transformers(version)


def check_transformers(version):
    """Raise ImportError for a version of transformers that is not known."""
    major, minor = (int("".join(filter(str.isdigit, part)) or 0) for part in f"{version}.0".split(".")[:2])
    if not FIRST <= (major, minor) < BEYOND:
        raise ImportError(
            f"kvfast.transformers knows transformers from {FIRST[0]}.{FIRST[1]} on and before {BEYOND[0]}, and {version} is "
            f'installed: pip install "transformers>={FIRST[0]}.{FIRST[1]},<{BEYOND[0]}"'
        )
