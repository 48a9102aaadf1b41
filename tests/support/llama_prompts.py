"""Stand-ins of ``Llama`` with a store, and prompts for them."""

import contextlib
import random

from llama_stand_in import VOCABULARY, Llama

from kvfast.llama_cpp import LlamaPromptCache

CHUNK = 16


def ids(length, seed=0):
    return random.Random(seed).choices(range(VOCABULARY), k=length)


PROMPT = ids(150)


@contextlib.contextmanager
def fresh(store, path, *types, cache=None, kind=Llama, **options):
    """A Llama as another process would have it, with a cache."""
    llm = kind(path, *types, **options)
    with LlamaPromptCache(store, llm, **{"chunk_tokens": CHUNK} | (cache or {})) as prompts:
        llm.set_cache(prompts)
        yield llm, prompts


def restored(prompt=PROMPT):
    """Tokens of a prompt that come from the store."""
    return (len(prompt) - 1) // CHUNK * CHUNK
