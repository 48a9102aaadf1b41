"""Writes reports as JSON with one result per line, so that a change of one result is a change of one line."""

import json
from pathlib import Path

WIDTH = 480  # characters of a line; a result with a dozen fields takes 350


def json_text(value, indent=0):
    """JSON in which a list or an object stands in one line if it is short and holds no list of objects."""
    flat = json.dumps(value)
    if not isinstance(value, dict | list) or (len(flat) <= WIDTH and not _holds_rows(value)):
        return flat
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        parts = [f"{inner}{json.dumps(str(name))}: {json_text(one, indent + 1)}" for name, one in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(inner + json_text(one, indent + 1) for one in value) + "\n" + " " * indent + "]"


def write_json(path, value):
    """Write a report to a file."""
    Path(path).write_text(json_text(value) + "\n", encoding="utf-8")


def _holds_rows(value):
    """Whether a list of objects is in it."""
    if isinstance(value, list):
        return any(isinstance(one, dict) or _holds_rows(one) for one in value)
    return isinstance(value, dict) and any(map(_holds_rows, value.values()))
