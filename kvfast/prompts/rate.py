"""Units per second, as measured so far."""

from __future__ import annotations

WEIGHT = 0.5  # of the newest measurement
FORGETTING = 1.1  # by which a rate is raised where it was too low to be used: otherwise nobody would find out that it has risen


class Rate:
    """A rate that follows its measurements: `value` units per second, 0.0 before the first of them."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def measured(self, count: float, seconds: float) -> None:
        """Remember how long `count` units took."""
        newest = count / max(seconds, 1e-9)
        self.value = WEIGHT * newest + (1 - WEIGHT) * self.value if self.value else newest

    def takes_longer(self, count: float, seconds: float) -> bool:
        """Whether `count` units take longer than `seconds`, as far as is known."""
        if not self.value or count / self.value <= seconds:
            return False
        self.value *= FORGETTING
        return True
