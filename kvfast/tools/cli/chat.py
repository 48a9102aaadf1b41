"""The command `chat` of `python -m kvfast`."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console

from kvfast.tools.cli.serve import checked_model, checked_store, load_model
from kvfast.tools.llama.fetch import cache_dir


class Server:
    """A server that speaks OpenAI's protocol, in the place of a ``Llama``."""

    cache = last = None

    def __init__(self, address, key):
        self._url = f"{address.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})

    def create_chat_completion(self, messages, **options):
        """The events of a stream, as they come."""
        body = json.dumps({"model": "any", "messages": messages} | options).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self._url, body, self._headers)) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise ValueError(event["error"]["message"])
                        yield event
        except urllib.error.HTTPError as error:
            raise ValueError(f"the server refuses: {error.read().decode(errors='replace').strip() or error}") from None
        except urllib.error.URLError as error:
            raise ValueError(f"no answer from {self._url}: {error.reason}") from None


def _opened(args):
    """A model or a server, and its name."""
    if args.model and re.match("https?://", args.model):
        key = args.api_key_file and Path(args.api_key_file).read_text("utf-8").strip()
        return Server(args.model, key), args.model
    path, context = checked_model(args)
    return load_model(args, path, context, checked_store(args)), path.stem


def run_chat(args):
    """Talk with a model, until the input ends. The conversation is written after each answer, if it has a name."""
    file = None if args.name is None else _file_of(args.name)
    messages = json.loads(file.read_text("utf-8")) if file is not None and file.exists() else []
    if not messages and args.system:
        messages.append({"role": "system", "content": args.system})
    (llm, name), console = _opened(args), Console(highlight=False, soft_wrap=True)
    console.print(f"[dim]{name}; an empty line or the end of the input ends the conversation, Ctrl-C an answer[/]")
    for message in messages:
        console.print(message["content"], style="bold" if message["role"] == "user" else "dim", markup=False)
    try:
        while text := _line(console):
            asked = [*messages, {"role": "user", "content": text}]
            try:
                answer = _answer(console, llm, asked, args)
            except ValueError as error:  # the conversation is longer than the context, or a server fails
                hint = "" if isinstance(llm, Server) else "; --context gives more room"
                console.print(f"{error}{hint}", style="red", markup=False)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]
            if file is not None:
                _write(file, messages)
    finally:
        if llm.cache:
            llm.cache.close()


def _file_of(name):
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"--name must be letters, digits, dots and hyphens, got {name!r}")
    return cache_dir() / "chats" / f"{name}.json"


def _line(console):
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""


def _answer(console, llm, messages, args):
    """Print an answer as it comes, and how fast that was. Ctrl-C ends it, and what there is of it stays."""
    pieces, begin, first = [], time.perf_counter(), None
    stream = llm.create_chat_completion(messages, stream=True, temperature=args.temperature, max_tokens=args.max_tokens)
    try:
        for event in stream:
            piece = event["choices"][0]["delta"].get("content")
            if piece:
                first = first or time.perf_counter()
                pieces.append(piece)
                console.print(piece, end="", markup=False)
    except KeyboardInterrupt:
        stream.close()
    first, end = first or time.perf_counter(), time.perf_counter()
    speed = f", {(len(pieces) - 1) / (end - first):.1f} tokens/s" if len(pieces) > 1 else ""
    reused = f"{llm.last.num_reused_tokens:,} of {llm.last.num_prompt_tokens:,} tokens reused, " if llm.last else ""
    console.print(f"\n[dim]{reused}first token after {first - begin:.2f} s{speed}[/]")
    return "".join(pieces)


def _write(file, messages):
    """Write a conversation in one step. Only its owner may read it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w", encoding="utf-8") as target:
        json.dump(messages, target, ensure_ascii=False, indent=1)
    os.replace(part, file)
