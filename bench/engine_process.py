"""Engines in processes of their own, for benches of prompts that outlive them."""

import contextlib
import json
import subprocess
import sys
import tempfile

from bench_store import start_redis


def serve(engine):
    """In such a process: answer the prompts of stdin, a line with the arguments of ``engine.answer`` each."""
    print("ready", flush=True)
    for line in sys.stdin:
        found = engine.answer(*json.loads(line))
        engine.flush()
        print(json.dumps(found), flush=True)


@contextlib.contextmanager
def process(script, arguments, **options):
    """A function that asks a fresh engine: it takes the arguments of ``engine.answer``.

    Parameters
    ----------
    script : str
        Gives `arguments` to its engine, and calls `serve`, where its option ``--engine`` has them.
    arguments : list
    options
        Of ``subprocess.Popen``.
    """
    command = [sys.executable, script, "--engine", json.dumps(arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as child:

        def line():
            while not (found := child.stdout.readline()).startswith(("ready", "[")):
                if not found:
                    raise RuntimeError("an engine ended")
            return found

        def ask(*prompt):
            child.stdin.write(json.dumps(prompt) + "\n")
            child.stdin.flush()
            return json.loads(line())

        line()
        yield ask
        child.stdin.close()


@contextlib.contextmanager
def store_of(parser, url):
    """The URL of a store: `url`, or that of a redis-server of its own; and a folder for what else is needed."""
    with tempfile.TemporaryDirectory() as folder:
        if url is not None:
            yield url, folder
            return
        server, port = start_redis(folder)
        if server is None:
            parser.error("there is no redis-server: name a --store")
        try:
            yield f"redis://127.0.0.1:{port}", folder
        finally:
            server.kill()
