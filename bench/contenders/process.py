"""A contender's process: both ends of the pipe.

One line of JSON is asked, one is answered: `prepare`, then `run` as often as one likes; the end of the pipe ends it.
Only the process that was asked works; the others wait for their pipe.
"""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from statistics import median
from threading import Timer
from time import perf_counter

from contenders import Missing, Work


class Process:
    """A contender, seen from outside: every call answers with a dict, which holds `failed` if that is what it did.

    Parameters
    ----------
    module, name, storage : str
    work : Work
    patience : float
        Seconds after which an answer is no longer waited for, and the process ended.
    """

    def __init__(self, module, name, storage, work, patience=900):
        self.patience = patience
        self.about = {"module": module, "name": name, "storage": storage, "work": asdict(work)}
        bench = str(Path(__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [bench, os.environ.get("PYTHONPATH")]))}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in quit()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors}
        self.process = subprocess.Popen([sys.executable, "-m", "contenders.process"], env=env, **pipes)

    def _ask(self, **question):
        timer = Timer(self.patience, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        return json.loads(answer) if answer else {"failed": self._last_words()}

    def _last_words(self):
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"process ended with {code}" + (f": {lines[-1][:200]}" if lines else "")

    def prepare(self, num_threads):
        """Fill the cache, run once, compare: seconds, error, nbytes, layers, version."""
        return self._ask(ask="prepare", num_threads=num_threads, **self.about)

    def run(self, num_threads, turn):
        """seconds of one run: the median of all but the first that begin within `turn` seconds, or of the only one."""
        return self._ask(ask="run", num_threads=num_threads, turn=turn)

    def quit(self):
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def _timed(contender, num_threads):
    if hasattr(contender, "ready"):
        contender.ready(num_threads)
    start = perf_counter()
    contender.run(num_threads)
    return perf_counter() - start


def _turn(contender, num_threads, seconds):
    runs, start = [_timed(contender, num_threads)], perf_counter()
    while perf_counter() - start < seconds - runs[0]:
        runs.append(_timed(contender, num_threads))
    return median(runs[1:] or runs)


def _prepare(question):
    module = import_module(question["module"])
    contender = module.Contender(Work(**question["work"]), question["name"], question["storage"])
    seconds = _timed(contender, question["num_threads"])
    about = {"error": contender.check(), "nbytes": contender.nbytes, "layers": contender.layers}
    return contender, {"seconds": seconds, "version": module.version(), **about}


def _serve():
    # Peers print what they like: the pipe is out of their reach.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contender = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["ask"] == "prepare":
                contender, answer = _prepare(question)
            else:
                answer = {"seconds": _turn(contender, question["num_threads"], question["turn"])}
        except (Missing, ImportError) as error:
            answer = {"missing": str(error)}
        except Exception as error:  # noqa: BLE001 - a peer may raise anything, and the others go on
            text = " ".join(str(error).split())
            answer = {"failed": f"{type(error).__name__}: {text[-300:]}"}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    out.close()


if __name__ == "__main__":
    _serve()
