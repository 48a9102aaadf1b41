"""The recurrent states that a sequence has next to keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


class States:
    """What a sequence or a snapshot tells of its checkpoints."""

    __slots__ = ()

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The numbers of first tokens after which there is a checkpoint, in ascending order."""
        return () if self._storage.checkpoints is None else self._storage.checkpoints.positions

    def states_at(self, n: int | None = None) -> dict[str, NDArray[Any]]:
        """The recurrent states of a checkpoint.

        Parameters
        ----------
        n : int, optional
            After how many tokens; by default after all that are complete.

        Returns
        -------
        dict of str to ndarray
            What `KVCache.add_checkpoint` got: read-only views, which stay valid. bfloat16 comes as that of ml_dtypes, or as its bits in
            uint16 if the package is missing.

        Raises
        ------
        MissingCheckpointError
            Its attribute `nearest` is the last position before `n` with a checkpoint.
        ValueError
            For a cache that was made without `max_state_bytes`.
        """
        return self._storage.states_at(n)

    @property
    def max_state_bytes(self) -> int | None:
        """The most bytes that checkpoints take; None for any number, or if there are no states."""
        return None if self._storage.checkpoints is None else self._storage.checkpoints.max_bytes
