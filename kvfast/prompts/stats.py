"""What a PromptCache did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PromptCacheStats:
    """What a `PromptCache` did in this process.

    Parameters
    ----------
    num_prompts : int
        Prompts that were looked up.
    num_hits : int
        Those of which some tokens were restored.
    num_tokens : int
        Tokens of all that were looked up.
    num_restored_tokens : int
    bytes_fetched, bytes_written : int
        What the store gave, and what it took.
    num_refused, bytes_refused : int
        Values that were offered to it and not taken, as it is full, slow or gone, and their bytes. What is not offered, in the pause
        after a failure, is not counted.
    seconds : float
        Time in `PromptCache.restore`.
    """

    num_prompts: int = 0
    num_hits: int = 0
    num_tokens: int = 0
    num_restored_tokens: int = 0
    bytes_fetched: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    num_refused: int = 0
    bytes_refused: int = 0

    def add(self, **counts: float) -> None:
        """Count more."""
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
