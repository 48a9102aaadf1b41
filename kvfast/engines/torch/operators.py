"""The operators: what they are called with, what they change, and what they return."""

import torch

from kvfast.engines.torch.pools import calls_of

_LIBRARY = torch.library.Library("kvfast", "DEF")
_LIBRARY.define(
    "append(Tensor(a!) blocks, Tensor k, Tensor v, Tensor slot_mapping, str dtype) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)
_LIBRARY.define(
    "attend(Tensor blocks, Tensor q, Tensor block_table, Tensor seq_lens, str dtype, Tensor? cu_seqlens_q=None, float? scale=None, "
    "float softcap=0.0, int sliding_window=0, Tensor? sinks=None, bool causal=True, int v_head_dim=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def append(blocks, k, v, slot_mapping, dtype):
    """Store tokens in the blocks of a layer: ``torch.ops.kvfast.append``.

    Parameters
    ----------
    blocks : tensor of `new_blocks`
        Is changed.
    k : tensor of shape (num_tokens, num_kv_heads, head_dim), float32, float16 or bfloat16
    v : tensor of shape (num_tokens, num_kv_heads, v_head_dim)
    slot_mapping : int64 of shape (num_tokens,)
        Where each token goes: the number of a block times the tokens of a block, plus its place in it; -1 for a token to leave out.
    dtype : str
        The format that the blocks were made for.
    """
    torch.ops.kvfast.append.default(blocks, k, v, slot_mapping, dtype)


def attend(
    blocks,
    q,
    block_table,
    seq_lens,
    dtype,
    cu_seqlens_q=None,
    scale=None,
    softcap=0.0,
    sliding_window=0,
    sinks=None,
    causal=True,
    v_head_dim=0,
):
    """Attention on the stored bytes of a layer: ``torch.ops.kvfast.attend``.

    Parameters
    ----------
    blocks : tensor of `new_blocks`
    q : tensor of shape (num_tokens, num_q_heads, head_dim), float32, float16 or bfloat16
        Queries of the last tokens of each sequence, sequence after sequence.
    block_table : int32 of shape (num_sequences, max_blocks)
    seq_lens : int32 of shape (num_sequences,)
        Tokens of each sequence, those of `q` included.
    dtype : str
        The format that the blocks were made for.
    cu_seqlens_q, scale, softcap, sliding_window, sinks, causal
        As in `kvfast.PagedKVCache.attend_batch`; tensors in place of arrays, and 0 for no cap and no window.
    v_head_dim : int
        Elements of a value; 0 for those of a key.

    Returns
    -------
    tensor of shape (num_tokens, num_q_heads, v_head_dim), of the dtype of `q`
    """
    return torch.ops.kvfast.attend.default(
        blocks, q, block_table, seq_lens, dtype, cu_seqlens_q, scale, softcap, sliding_window, sinks, causal, v_head_dim
    )


def _append(blocks, k, v, slot_mapping, dtype):
    if k.requires_grad or v.requires_grad:
        raise _no_gradients("append")
    calls_of(blocks, k.shape[-1], v.shape[-1], dtype).append(k, v, slot_mapping)


def _attend(
    blocks,
    q,
    block_table,
    seq_lens,
    dtype,
    cu_seqlens_q=None,
    scale=None,
    softcap=0.0,
    sliding_window=0,
    sinks=None,
    causal=True,
    v_head_dim=0,
):
    if q.requires_grad:
        raise _no_gradients("attend")
    tokens, heads, head_dim = q.shape
    v_head_dim = v_head_dim or head_dim
    out = q.new_empty((tokens, heads, v_head_dim))
    calls_of(blocks, head_dim, v_head_dim, dtype).attend(
        q, block_table, seq_lens, cu_seqlens_q, out, scale, softcap, sliding_window, None if sinks is None else sinks.float(), causal
    )
    return out


def _append_fake(blocks, k, v, slot_mapping, dtype):
    _check_devices(blocks, k, v, slot_mapping)


def _check_devices(*tensors):
    """Refuse tensors without data next to others: nothing would be stored or read, without a word."""
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on the CPU, or without data on meta, got {' and '.join(sorted(devices))}")


def _no_gradients(name):
    return RuntimeError(f"kvfast::{name} has no gradients: call the model under torch.no_grad()")


def _attend_fake(blocks, q, block_table, seq_lens, dtype, *options, v_head_dim=0, **others):
    _check_devices(blocks, q, block_table, seq_lens)
    v_head_dim = options[6] if len(options) > 6 else v_head_dim
    return q.new_empty((q.shape[0], q.shape[1], v_head_dim or q.shape[2]))


_LIBRARY.impl("append", _append, "CPU")
_LIBRARY.impl("attend", _attend, "CPU")
torch.library.register_fake("kvfast::append", _append_fake, lib=_LIBRARY)
torch.library.register_fake("kvfast::attend", _attend_fake, lib=_LIBRARY)
