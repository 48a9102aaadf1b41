"""Prefixes of prompts outside the process, in chunks that all prompts with the same beginning share.

- prompt_cache, prompt_keeper: `PromptCache`, and the base that it shares with the caches of engines
- chunk_store: finds, fetches and puts values by their keys
- chain, envelope, payloads: keys, headers of values, and what is in them
- prompt, reader: one prompt of a cache, and how it comes back
- patient, rate, writer: calls of a store that may fail, how fast they are, and what is on its way
- weights: digests of the files of a model
- stats: what a `PromptCache` did
- stores: the places of values
"""
