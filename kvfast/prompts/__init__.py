"""Prefixes of prompts outside the process, in chunks that all prompts with the same beginning share.

- prompt_cache: `PromptCache`
- prompt, reader, writer: one prompt of a cache, from the store and to it
- chain, envelope, payloads: keys, values, and what is in them
- fetching, patient: several chunks at once, calls of a store that may fail
- opening, weights: stores and weights by what the user names
- stats: what a `PromptCache` did
- stores: the places of values
"""
