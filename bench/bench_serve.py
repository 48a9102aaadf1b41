"""Seconds to the first token from `python -m kvfast serve`: of a prompt that is computed, and of the same prompt from a store.

    pip install -e ".[serve]"
    python bench/bench_serve.py bench/serve.json
    python bench/bench_serve.py serve.json --lengths 500,1000 --rounds 1

A server computes prompts of several lengths, and a second one, in a new process, finds them. docs/pictures.py draws the times.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

from kvfast.tools.cli.bench.json_file import write_json
from kvfast.tools.cli.bench.measure import cpu_name
from kvfast.tools.cli.reading import opening_text


@contextlib.contextmanager
def server(store):
    """The address of a server with a store in a folder."""
    command = [sys.executable, "-m", "kvfast", "serve", "--port", "0", "--store", store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        found = re.search(r"http://\S+/v1", child.stdout.readline())
        if not found:
            raise RuntimeError(f"no server: run {' '.join(command)}")
        yield found[0]
        child.terminate()


def ask(address, prompt):
    """Tokens of a prompt, and seconds to the token after it."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/completions", body, {"content-type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request) as answer:
        usage = json.load(answer)["usage"]
    return usage["prompt_tokens"], time.perf_counter() - begin


def main(path, lengths, num_rounds):
    text, rows = opening_text() * 2, {}
    for number in range(num_rounds):
        prompts = [text[100 * i + 1000 * number :][:length] for i, length in enumerate(lengths)]  # none begins as another one
        with tempfile.TemporaryDirectory() as store:
            for name in ("computed", "from the store"):
                with server(store) as address:
                    ask(address, "A first answer, which loads what is used.")
                    for prompt in prompts:
                        tokens, seconds = ask(address, prompt)
                        rows.setdefault(name, {}).setdefault(len(prompt), []).append((seconds, tokens))
    median = {name: [sorted(rounds)[num_rounds // 2] for rounds in of_name.values()] for name, of_name in rows.items()}
    seconds = {name: [round(one, 4) for one, _ in found] for name, found in median.items()}
    write_json(path, {"cpu": cpu_name(), "tokens": [tokens for _, tokens in median["computed"]], "seconds": seconds})
    print(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", help="the JSON file to write")
    parser.add_argument("--lengths", default="2000,4000,8000,16000", help="characters, of which a token has about four")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    main(given.file, [int(length) for length in given.lengths.split(",")], given.rounds)
