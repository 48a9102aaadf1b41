"""The pool of threads that builds without OpenMP have, alone: a program in C, which ci/windows.sh and ci/tsan.sh run, too."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import kvfast

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
SOURCE = Path(__file__).with_name("thread_pool.c")
HEADER = Path(kvfast.__file__).parent / "core" / "thread_pool.h"


def run(folder, *flags, edit=None):
    """Compile the program, with lines of the pool changed, and run it: (exit status, what it said)."""
    if not HEADER.exists():
        pytest.skip("the sources are not here")
    (folder / "core").mkdir(exist_ok=True)
    text = HEADER.read_text()
    if edit:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    (folder / "core" / "thread_pool.h").write_text(text)
    command = [*shlex.split(os.environ.get("CC", "cc")), "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    subprocess.run([*command, f"-I{folder}", str(SOURCE), "-o", str(folder / "program")], check=True)
    done = subprocess.run([str(folder / "program")], capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


def test_calls_have_their_threads(tmp_path):
    """One after the other, growing, within each other, at the same time, and after forks; it ends while helpers wait."""
    assert run(tmp_path) == (0, "")


def test_threads_that_never_wait_awake(tmp_path):
    """Each call then wakes helpers that sleep, and sleeps until they are done."""
    assert run(tmp_path, edit=("KV_ROUNDS = 3000,", "KV_ROUNDS = 0,")) == (0, "")


def test_the_system_may_refuse_threads(tmp_path):
    """The caller does all shares then, and the program notices that nobody helps."""
    status, told = run(tmp_path, "-DPATIENCE=2", edit=("kv_pool.helpers < shares - 1 && kv_start_helper()", "0 && kv_start_helper()"))
    assert status == 1 and "has as many threads" in told and "follow each other" not in told and "that meet" not in told
