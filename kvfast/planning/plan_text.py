"""A `MemoryPlan` for reading: the cells of its table, its conditions, and both as plain text."""

from collections import Counter

from kvfast.core.text import counted, size_text
from kvfast.planning.vllm_blocks import DEFAULTS

MARK = " *"  # after the name of the default format
GAP = "  "  # between columns
# A prompt in one append is told where it takes this many times the memory of the sequence.
TELL_PROMPT = 1.1


def plain_text(found):
    """The title, the table and the conditions."""
    heads = [name.partition("\n")[::2] for name in _columns(found)]
    rows = [[first if second else "" for first, second in heads], [second or first for first, second in heads]]
    rows += [_cells(found, one) for one in found.dtypes]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [GAP.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    rule = "-" * (sum(widths) + len(GAP) * (len(widths) - 1))
    title = f"{found.model.name}: {_layers(found.model.layers)}\n{counted(found.batch, 'sequence')} of {found.context:,} tokens"
    return "\n".join([title, rule, *lines[:2], rule, *lines[2:], rule, _conditions(found)])


def _columns(found):
    """The names of the columns, each with a line break where it may have one."""
    names = ["dtype", "bytes a\ntoken", "one\nsequence", "all", "fits", "longest\ncontext", "largest\nbatch", "tokens/s\nat most"]
    if found.batch == 1:
        names.remove("one\nsequence")  # which is all
    if found.engine == "vllm":
        names.insert(2, "tokens\na GiB")
    return [*names, "with\nweights"] if _knows_weights(found) else names


def _cells(found, one):
    """The row of one format of a plan, as text."""
    row = [one.dtype + MARK * (one.dtype == DEFAULTS[found.engine]), f"{one.bytes_per_token:,}"]
    row += [f"{one.tokens_per_gib:,}"] * (found.engine == "vllm")
    row += [size_text(one.bytes_per_sequence)] * (found.batch > 1) + [size_text(one.nbytes)]
    row.append("?" if one.fits is None else "yes" if one.fits else "no")
    row.append("any" if found.memory is not None and one.longest_context is None else _number(one.longest_context))
    row += [_number(one.largest_batch), _rate(one.tokens_per_second)]
    return [*row, _rate(one.tokens_per_second_with_weights)] if _knows_weights(found) else row


def _conditions(found):
    """The conditions of the figures of a plan."""
    model = found.model
    memory = "Memory unknown" if found.memory is None else f"{size_text(found.memory)} of memory for keys and values"
    if _knows_weights(found):
        memory += f", next to {size_text(model.weight_bytes)} of weights"
        if model.weight_bytes_read < model.weight_bytes:
            memory += f", of which a token reads {size_text(model.weight_bytes_read)}"
    lines = [
        f"{memory}; {found.bandwidth / 1e9:.1f} GB/s read.",
        "Tokens per second, of all sequences, are at most these: they come from the read bandwidth alone. Computing takes time, too.",
    ]
    if any(one.dtype == DEFAULTS[found.engine] for one in found.dtypes):
        lines.append(f"{MARK.strip()} the default format{' of vLLM' * (found.engine == 'vllm')}.")
    if found.checkpoints:
        each = min(found.dtypes, key=lambda one: one.dtype != DEFAULTS[found.engine])
        lines.append(
            f"Each sequence has {counted(found.checkpoints, 'checkpoint')} of recurrent states, {size_text(model.state_bytes)} each, as much "
            f"as {model.state_bytes // each.bytes_per_token:,} tokens in {each.dtype}; the states that compute come on top."
        )
    prompts = [_prompt(found, one) for one in found.dtypes if one.bytes_of_prompt > TELL_PROMPT * one.bytes_per_sequence]
    if prompts:
        lines.append(f"A sequence whose {found.context:,} tokens come in one append takes more until `advance`: {', '.join(prompts)}.")
    return "\n".join(lines + [f"Note: {note}." for note in found.notes])


def _prompt(found, one):
    peak = one.bytes_of_prompt + (found.batch - 1) * one.bytes_per_sequence
    too_much = found.memory is not None and peak > found.memory
    return f"{one.dtype} {size_text(one.bytes_of_prompt)}{' (does not fit)' * too_much}"


def _knows_weights(found):
    return found.model.weight_bytes_read is not None


def _layers(layers):
    """Layers for reading, those of one shape together."""
    parts = []
    for layer, count in Counter(layers).items():
        if layer.rope_dim is not None:
            shape = f"latent rows of {layer.head_dim} + {layer.rope_dim}"
        else:
            shape = f"{counted(layer.num_kv_heads, 'KV head')} of {layer.head_dim}"
            if layer.v_head_dim is not None:
                shape += f" and {layer.v_head_dim}"
        window = "" if layer.sliding_window is None else f", window {layer.sliding_window:,}"
        parts.append(f"{counted(count, 'layer')} x {shape}{window}")
    return "; ".join(parts)


def _number(value):
    return "?" if value is None else f"{value:,}"


def _rate(value):
    return "?" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
