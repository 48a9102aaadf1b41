from typing import Any

from kvfast.sequence import SequenceBuffer

def layout(buffer: SequenceBuffer, length: int, places: list[dict[str, int]]) -> list[tuple[Any, Any]]: ...
def reopen(
    buffer: SequenceBuffer,
    length: int,
    places: list[dict[str, int]],
    memory: Any = ...,
    offsets: list[Any] | None = ...,
    reserve: int = ...,
) -> None: ...
def streams(buffer: SequenceBuffer) -> list[Any]: ...
def arrays(buffer: SequenceBuffer) -> list[Any]: ...
