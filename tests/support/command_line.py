"""`python -m kvfast`: in a process of its own, and, as that takes most of the time, in this one."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import kvfast
from kvfast.tools import cli


def command(*args):
    return [sys.executable, "-m", "kvfast", *map(str, args)]


def run(*args, **options):
    """Run `python -m kvfast` to its end: (exit code, stdout, stderr)."""
    places = os.pathsep.join([str(Path(kvfast.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONIOENCODING": "utf-8", "PYTHONPATH": places}
    result = subprocess.run(command(*args), capture_output=True, encoding="utf-8", env=environment, timeout=300, check=False, **options)
    return result.returncode, result.stdout, result.stderr


def run_here(*args):
    """The same in this process, for what does not set the number of threads."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(arg) for arg in args])
        except SystemExit as end:  # of argparse
            code = end.code
    return code, out.getvalue(), err.getvalue()
