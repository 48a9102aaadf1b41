"""Prefixes of prompts kept outside the process, in chunks that all prompts with the same beginning share."""
