"""The plan of a call of `attend`, as users see it."""

from __future__ import annotations

from dataclasses import dataclass

from kvfast.core.text import counted


@dataclass(frozen=True)
class AttendItem:
    """Queries that read the same keys together. Its tasks are KV heads x runs of splits x row blocks.

    Parameters
    ----------
    num_queries : int
        Query tokens.
    begin, end : int
        Range of positions that they read; sink tokens come in addition. With chosen tokens, 0 and how many there are.
    splits : tuple of int
        Where each part begins that this range is cut into.
    run : int
        Splits of a task, which follow each other. With more threads there are more tasks, with fewer splits each.
    row_blocks : int
        Number of passes over the same keys. Each pass computes some of the rows (query tokens x query heads of a KV head).
    """

    num_queries: int
    begin: int
    end: int
    splits: tuple[int, ...]
    run: int
    row_blocks: int

    @property
    def num_splits(self) -> int:
        """How many splits there are."""
        return len(self.splits)

    @property
    def num_runs(self) -> int:
        """Tasks of a KV head and row block."""
        return -(-len(self.splits) // self.run)


@dataclass(frozen=True)
class AttendPlan:
    """The plan of a call of `attend`; see `KVCache.explain`. ``str(plan)`` is a readable text.

    Parameters
    ----------
    isa : str
        Tier of the kernels.
    precision : str
        ``"exact"``, ``"fast"`` or ``"invariant"``.
    storage : str
        Format of the layer.
    kernels : tuple of str
        Kernels that read the stored bytes, for scores and for sums of values. A family of panels (``attend_tiles8``,
        ``attend_tiles_bf16`` or ``attend_words16``) does both for many rows.
    float_kernels : tuple of str
        Kernels for the first and newest tokens if the format keeps these as float rows; otherwise empty.
    q_shape : tuple of int
    q_dtype : str
    num_kv_heads : int
    v_head_dim : int
        Width of the output.
    context : int
        Tokens that the layer holds; for a batch, those of all sequences together.
    uncounted : int
        How many of them were not counted with `advance`.
    tile, float_tile : int
        Tokens between two softmax corrections, for codes and for float rows; 0 if there are none.
    rows : int
        Largest number of query rows in one pass.
    num_threads, num_tasks : int
    items : tuple of AttendItem
        One for most calls. There are more in a batch, and where some queries read their sink tokens in different splits.
    code_bytes, scale_bytes, float_bytes : int
        Bytes that the kernels read in all passes: of codes, of scales (of tokens and channels, and means) and of float
        rows. They come from memory, or from the processor's caches if another pass has just read them.
    operations : int
        Multiplications and additions for scores and sums, including masked tokens in their tiles.
    notes : tuple of str
        Slow paths of the call, and their cost.
    """

    isa: str
    precision: str
    storage: str
    kernels: tuple[str, ...]
    float_kernels: tuple[str, ...]
    q_shape: tuple[int, int, int]
    q_dtype: str
    num_kv_heads: int
    v_head_dim: int
    context: int
    uncounted: int
    tile: int
    float_tile: int
    rows: int
    num_threads: int
    num_tasks: int
    items: tuple[AttendItem, ...]
    code_bytes: int
    scale_bytes: int
    float_bytes: int
    operations: int
    notes: tuple[str, ...]

    @property
    def bytes_read(self) -> int:
        """Bytes of keys and values that the kernels read in total."""
        return self.code_bytes + self.scale_bytes + self.float_bytes

    @property
    def num_splits(self) -> int:
        """Largest number of splits of an item."""
        return max(item.num_splits for item in self.items)

    def __str__(self) -> str:
        tokens, heads, dim = self.q_shape
        dims = dim if dim == self.v_head_dim else f"{dim}/{self.v_head_dim}"
        kernels = ", ".join(self.kernels)
        if self.float_kernels:
            kernels += f"; {', '.join(self.float_kernels)} for the first and newest tokens"
        tiles = f"{self.tile} tokens" + (f", {self.float_tile} of float rows" if self.float_tile else "")
        uncounted = f" ({self.uncounted:,} not counted)" if self.uncounted else ""
        lines = [
            (
                f"attend of {counted(tokens, 'token')} x {heads} heads ({self.q_dtype}) to {counted(self.context, 'token')}{uncounted} x "
                f"{self.num_kv_heads} KV heads of {dims}, {self.storage}"
            ),
            f"tier     {self.isa}, {self.precision}: {kernels}",
            (
                f"work     {counted(self.num_tasks, 'task')} on {counted(self.num_threads, 'thread')}; tiles of {tiles}; "
                f"up to {counted(self.rows, 'query row')} a pass"
            ),
        ]
        for item in self.items[:MOST_ITEMS]:
            lines.append(
                f"         {counted(item.num_queries, 'query', 'queries')}, positions {item.begin:,} to {item.end:,}: "
                f"{self.num_kv_heads} KV heads x {counted(item.num_runs, 'run')} of {counted(item.run, 'split')} x "
                f"{counted(item.row_blocks, 'row block')}"
            )
        if len(self.items) > MOST_ITEMS:
            lines.append(f"         and {len(self.items) - MOST_ITEMS} more")
        lines += [
            (
                f"reads    {_size(self.bytes_read)}: codes {_size(self.code_bytes)}, scales {_size(self.scale_bytes)}, "
                f"float rows {_size(self.float_bytes)}"
            ),
            f"computes {self.operations / 1e6:,.1f} million operations",
        ]
        lines += [f"note     {note}" for note in self.notes]
        return "\n".join(lines)


# Items that the text lists one by one.
MOST_ITEMS = 8


def _size(nbytes):
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 10**5 else f"{nbytes:,} B"
