"""`python -m kvfast` in a process of its own."""

import os
import subprocess
import sys


def command(*args):
    return [sys.executable, "-m", "kvfast", *map(str, args)]


def run(*args, **options):
    """Run `python -m kvfast` to its end: (exit code, stdout, stderr)."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(
        command(*args), capture_output=True, encoding="utf-8", env=environment, timeout=300, check=False, **options
    )
    return result.returncode, result.stdout, result.stderr
