"""What a store of prompts holds."""

import json
import math
import os
import time

from rich.console import Console
from rich.table import Table

from kvfast.engine import HEADER_BYTES, num_tokens_of, open_store, size_text

KINDS = {"c": "chunk", "e": "end of a prompt", "t": "list of tails"}
DAY = 86400


def run_store(args):
    """Remove what is asked for, and show the rest."""
    if "://" not in args.store and not os.path.isdir(args.store):
        raise ValueError(f"there is no folder {args.store}")
    store = open_store(args.store)
    try:
        entries = sorted(store.entries(), key=lambda entry: (-entry.hits, -_last_used(entry)))
        removed = _prunable(entries, args.older_than, args.max_bytes)
        store.delete([entry.key for entry in removed])
        gone = {entry.key for entry in removed}
        entries = [entry for entry in entries if entry.key not in gone]
        rows = [_row(store, entry) for entry in entries if entry.key[0] in "ce"][: args.show]
    finally:
        store.close()
    counts = {name: sum(entry.key.startswith(kind) for entry in entries) for kind, name in KINDS.items()}
    total = sum(entry.nbytes for entry in entries)
    if args.json:
        found = {
            "store": store.url,
            "nbytes": total,
            "prompts": counts[KINDS["e"]],
            "chunks": counts[KINDS["c"]],
            "removed": len(removed),
            "values": rows,
        }
        print(json.dumps(found, indent=2))
        return
    print(f"{store.url}: {counts[KINDS['e']]:,} prompts, {counts[KINDS['c']]:,} chunks, {size_text(total)}")
    table = Table()
    for name in ("value", "kind", "tokens", "bytes", "last used", "hits"):
        table.add_column(name, justify="left" if name in ("value", "kind") else "right")
    for row in rows:
        age = "?" if row["seconds_since_use"] is None else _age(row["seconds_since_use"])
        tokens = "?" if row["tokens"] is None else f"{row['tokens']:,}"
        table.add_row(
            row["key"][:14], row["kind"], tokens, size_text(row["nbytes"]), age, "?" if row["hits"] < 0 else f"{row['hits']:,}"
        )
    Console().print(table)
    if len(rows) < counts[KINDS["e"]] + counts[KINDS["c"]]:
        print(f"the {len(rows)} most used; --show N for more")
    if removed:
        print(f"removed  {len(removed):,} values of {size_text(sum(entry.nbytes for entry in removed))}")


def _prunable(entries, older_than, max_bytes):
    """Entries that are too old, and the least recently used of the others that are too many."""
    now, removed, total = time.time(), [], sum(entry.nbytes for entry in entries)
    for entry in sorted(entries, key=_last_used):
        is_old = older_than is not None and now - _last_used(entry) > older_than * DAY
        if is_old or max_bytes is not None and total > max_bytes:
            removed.append(entry)
            total -= entry.nbytes
    return removed


def _row(store, entry):
    (value,) = store.get_many([entry.key])
    tokens = None
    if value is not None:
        with value:
            if len(value) >= HEADER_BYTES:
                tokens = num_tokens_of(bytes(value.read(0, HEADER_BYTES)))
    since = None if math.isnan(entry.last_used) else max(0.0, time.time() - entry.last_used)
    return {
        "key": entry.key,
        "kind": KINDS[entry.key[0]],
        "tokens": tokens,
        "nbytes": entry.nbytes,
        "seconds_since_use": since,
        "hits": entry.hits,
    }


def _last_used(entry):
    return time.time() if math.isnan(entry.last_used) else entry.last_used


def _age(seconds):
    for unit, size in (("d", DAY), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit} ago"
    return f"{seconds:.0f} s ago"
