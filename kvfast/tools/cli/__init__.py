"""The command line, `python -m kvfast <command>`.

- llama, evaluate, plan, serve, chat, store, bench: the commands, by what they use
- settings, hugging_face: arguments that several commands share; models of Hugging Face
- reading: long texts of `generate`

Each command has a function here that declares its arguments and names the function that runs it. This
module needs NumPy alone: what runs a command is imported with the command.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

import kvfast
from kvfast.engine import MAX_TOKENS

# Package -> the extra that has it.
EXTRAS = dict.fromkeys(["gguf", "tokenizers", "rich", "safetensors", "xxhash"], "llama")
EXTRAS |= dict.fromkeys(["torch", "transformers"], "transformers")
EXTRAS |= {"matplotlib": "plot", "llama_cpp": "llama-cpp", "redis": "redis", "obstore": "cloud", "cryptography": "encrypted"}


def main(argv=None):
    """Run one command, with the arguments of the process or of a list.

    Returns the exit code: 0, 1 for an error reported in one line, 2 for missing packages (and, from argparse, for wrong usage),
    130 for an interrupt.
    """
    parser = argparse.ArgumentParser(prog="python -m kvfast", description="A compressed KV cache for CPU inference.")
    commands = parser.add_subparsers(metavar="command")
    for add_command in (
        _add_generate,
        _add_eval,
        _add_calibrate,
        _add_serve,
        _add_chat,
        _add_serve_sim,
        _add_store,
        _add_plan,
        _add_llama_cpp,
        _add_bench,
        _add_info,
    ):
        add_command(commands)
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        args.run(args)
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        extra = (EXTRAS | getattr(args, "extras", {})).get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _fail(f'the {extra} extra is needed: pip install "kvfast[{extra}]"', 2)
    except BrokenPipeError:
        # The reader, `head` for example, has gone. Python would flush into the pipe once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error, 1)
    except MemoryError as error:
        return _fail(f"not enough memory. {error}", 1)
    except (ValueError, RuntimeError) as error:
        return _fail(error, 1)
    return 0


def _fail(message, code):
    sys.stdout.flush()
    print(f"error: {message}", file=sys.stderr)
    return code


def _add_generate(commands):
    parser = commands.add_parser(
        "generate",
        help="continue a text with a language model",
        description="Continue a text with a language model whose keys and values live in a kvfast cache. Without a text, the model "
        "reads the first chapters of a novel, some 4,000 tokens.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", metavar="TEXT", help="the text to continue")
    add("--text", metavar="FILE", help="continue the text of a file")
    _add_model_arguments(parser)
    add("--dtype", help="format of the cache, or of K and V with a slash: int8/int4 (default: int4)")
    add("--session", metavar="FILE", help="continue the text in FILE, and save the longer text there")
    _add_prompt_cache(parser)
    add("--max-tokens", type=_positive, default=128, help="stop after this number of tokens (default: 128)")
    add("--max-seq-len", type=_positive, help="tokens the cache has room for (default: as many as needed)")
    add(
        "--keep",
        type=_natural,
        metavar="N",
        help="when the cache is full, go on: keep the first N tokens, and drop half of the others (default: stop)",
    )
    add("--temperature", type=float, help="0 takes the likeliest token (default: 0, and 1 without a text)")
    add("--top-k", type=int, default=0, help="draw from the k likeliest tokens only (default: 0, no limit)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens whose probabilities sum to this (default: 1)")
    add("--seed", type=_natural, help="make the draws repeatable")
    add(
        "--speculative",
        nargs="?",
        const="lookup",
        choices=["lookup", "tree"],
        help="guess tokens and check them together, for the same text. Guess from an earlier passage (lookup) or from several "
        "(tree: a near tie may fall otherwise) (default: lookup)",
    )
    add("--draft-tokens", type=int, choices=range(1, 8), default=7, metavar="N", help="largest number of guesses, 1 to 7 (default: 7)")
    add("--compare", action="store_true", help="generate without guesses as well; compare tokens and time")
    parser.set_defaults(run=_later("llama", "run_generate"))


def _add_prompt_cache(parser):
    parser.add_argument(
        "--prompt-cache",
        metavar="STORE",
        help="keep prompts in a folder, or in redis://, s3:// and others, and reuse the prompts that it has",
    )


def _add_eval(commands):
    parser = commands.add_parser(
        "eval",
        help="measure how much quality a compressed cache loses",
        description="Predict a text token by token with a float32 cache and with others, and compare the predictions.",
    )
    add = parser.add_argument
    _add_model_arguments(parser, "a GGUF file, or a folder or name of Hugging Face, which transformers computes in float32")
    add(
        "--formats",
        "--dtype",
        default="all",
        metavar="LIST",
        help="formats of the caches, as for generate, with commas: int4,int8/int8; or all (default: all)",
    )
    add("--llama-cpp", metavar="TYPES", help="also measure llama.cpp's caches of these types (K/V): q8_0,q8_0/q4_0")
    add(
        "--compress",
        metavar="LIST",
        help="compress the beginning of each text instead, and predict the rest: lowrank:RANK, hybrid:BITS, "
        "hybrid:RANK:BITS, pq:CENTROIDS:SUBVECTORS or a format, with commas; or all",
    )
    add("--prompt", type=_positive, metavar="N", help="tokens to compress (default: all but 512)")
    add(
        "--task",
        choices=["predict", "retrieval", "arithmetic", "code"],
        default="predict",
        help="predict every token of the texts, or retrieve numbers, sums or lines of code that are hidden in one (default: predict)",
    )
    add(
        "--lengths", type=_numbers, default=[1500, 4000, 7000], metavar="LIST", help="for tasks: their tokens (default: 1500,4000,7000)"
    )
    add(
        "--seeds",
        type=_positive,
        default=3,
        metavar="N",
        help="for tasks: their number of each length, with the seeds 0 to N - 1 (default: 3)",
    )
    add("--pairs", type=_positive, default=24, metavar="N", help="for tasks: sentences that each hides (default: 24)")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", nargs="+", action="extend", metavar="FILE", help="UTF-8 text files, which are measured separately")
    novel = [str(Path(__file__).parents[1] / "llama" / "chapters.txt")]
    source.add_argument("--novel", dest="text", action="store_const", const=novel, help="the text of kvfast, some 4,700 tokens")
    source.add_argument("--compare", nargs="+", metavar="FILE", help="print the figures of reports, by text, cache and length")
    add("--tokens", type=_positive, default=8000, help="use this many tokens of each text (default: 8000)")
    add("--chunk", type=_positive, default=16, help="tokens per forward pass (default: 16, see kvfast.evaluation.evaluate)")
    add("--plot", metavar="FILE", help="draw KL over bits per element: a PNG, SVG or PDF file")
    add("--json", action="store_true", help="print JSON instead of a table")
    add(
        "--report",
        metavar="FILE",
        help="also write JSON to compare with other models: sizes, processor, versions, all figures by length; no text or path",
    )
    parser.set_defaults(run=_later("evaluate", "run_eval"))


def _add_calibrate(commands):
    parser = commands.add_parser(
        "calibrate",
        help="fit the storage of keys to a model",
        description="Measure the queries and keys of a model on a text, and write the bases that store its keys with the least error.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a GGUF file")
    add("--text", required=True, metavar="FILE", help="a UTF-8 text file")
    add("--tokens", type=_positive, default=3072, help="use this many tokens of the text (default: 3072)")
    add("--out", required=True, metavar="FILE", help="the file to write, with NumPy arrays (.npz)")
    add("--threads", type=_positive, help="threads to compute with (default: all CPUs)")
    parser.set_defaults(run=_later("evaluate", "run_calibrate"))


def _add_serve(commands):
    parser = commands.add_parser(
        "serve",
        help="serve a model by the protocol of OpenAI, with prompts that outlive the server",
        description="Serve a GGUF file by llama-cpp-python's server with kvfast's attention, or a model of Hugging Face by vLLM.",
    )
    add = parser.add_argument
    _add_served_model(parser, "a GGUF file, or a folder or name of Hugging Face")
    add("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, for this machine alone)")
    add("--port", type=_natural, default=8000, help="port to listen at; 0 takes a free one (default: 8000)")
    add("--api-key-file", metavar="FILE", help="a file with the key that clients must have")
    add("--parallel", type=_positive, metavar="N", help="answers at once, each in a context of its own (default: 1; of vLLM: its own)")
    add("--max-waiting", type=_natural, default=64, metavar="N", help="most requests that wait for those (default: 64)")
    parser.set_defaults(run=_later("serve", "run_serve"))


def _add_chat(commands):
    parser = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. A conversation that has a name goes on at the next start, without computing its past.",
    )
    add = parser.add_argument
    _add_served_model(parser, "a GGUF file, or the address of a server")
    add("--api-key-file", metavar="FILE", help="a file with the key of the server")
    add("--name", help="keep the conversation under this name, and go on with it")
    add("--system", metavar="TEXT", help="how the model shall answer, at the beginning of a conversation")
    add("--temperature", type=float, default=0.7, help="0 takes the likeliest tokens (default: 0.7)")
    add("--max-tokens", type=_positive, metavar="N", help="most tokens of an answer (default: those of the context)")
    parser.set_defaults(run=_later("chat", "run_chat"))


def _add_served_model(parser, kinds):
    """Arguments of commands that run a model by llama-cpp-python."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"{kinds} (default: SmolLM2-135M-Instruct, fetched once)")
    add("--cache-type", choices=["q8_0", "q4_0", "f16"], default="q8_0", help="type of keys and values (default: q8_0)")
    add("--context", type=_positive, metavar="N", help="tokens of a prompt and its answer (default: the model's, up to 8192)")
    add("--threads", type=_positive, help="threads to compute with (default: all CPUs)")
    add("--store", metavar="URL", help="a folder, or redis://, s3:// and others; none (default: a folder in the user's cache)")
    add("--store-size", type=_gigabytes, metavar="GB", help="most gigabytes of a folder (default: 4)")
    add("--verbose", action="store_true", help="print what llama.cpp says")
    packages = ["llama_cpp", "fastapi", "uvicorn", "prometheus_client", "gguf", "xxhash", "safetensors", "rich"]
    extras = dict.fromkeys(packages, "serve") | {"vllm": "vllm"}
    parser.set_defaults(extras=extras)


def _add_serve_sim(commands):
    parser = commands.add_parser(
        "serve-sim",
        help="serve many requests at once from one paged pool",
        description="Continue many prompts that share a system prompt, by continuous batching over one paged pool. "
        "Then continue each prompt by itself, and compare the texts.",
    )
    add = parser.add_argument
    _add_model_arguments(parser)
    add("--requests", type=_positive, default=32, help="number of prompts (default: 32)")
    add("--max-tokens", type=_positive, default=32, help="tokens per request (default: 32)")
    add("--dtype", default="int4", help="as for generate (default: int4)")
    add("--blocks", type=_positive, help="blocks of the pool (default: enough for all requests at once)")
    add("--block-size", type=_positive, help="tokens of a block (default: 64, or the number that the format needs)")
    add("--max-running", type=_positive, default=16, help="requests in one step (default: 16)")
    add("--show", type=_natural, default=2, help="number of texts to print (default: 2)")
    _add_prompt_cache(parser)
    add("--no-check", dest="check", action="store_false", help="do not run each request by itself as well")
    parser.set_defaults(run=_later("llama", "run_serve_sim"))


def _add_store(commands):
    parser = commands.add_parser(
        "store",
        help="show the contents of a store of prompts, and prune it",
        description="Show the prompts in a folder or on a server, with their length, bytes, age and number of uses.",
    )
    add = parser.add_argument
    add("store", help="a folder, or redis://, s3:// and others")
    add("--show", type=_natural, default=20, metavar="N", help="values to show, the most used first (default: 20)")
    add("--older-than", type=float, metavar="DAYS", help="remove values that were not used for DAYS days")
    add("--max-bytes", type=_natural, metavar="N", help="remove the least recently used values, until N bytes are left")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_later("store", "run_store"))


def _add_plan(commands):
    parser = commands.add_parser(
        "plan",
        help="report how much memory a model's cache takes on this machine",
        description="Report for every format of a model's cache: its bytes, the tokens that fit into this machine's memory, "
        "and the most tokens per second that the read bandwidth allows.",
    )
    add = parser.add_argument
    add("model", help="a config.json, its folder, or a GGUF file")
    add("--context", type=_positive, metavar="N", help="tokens of a sequence (default: the model's longest context)")
    add("--batch", type=_positive, default=1, metavar="N", help="sequences at once (default: 1)")
    add("--checkpoints", type=_natural, default=1, metavar="N", help="of recurrent states in each sequence of a hybrid (default: 1)")
    add("--dtype", metavar="LIST", help="formats of the caches, with commas (default: all)")
    add(
        "--memory",
        type=_gigabytes,
        metavar="GB",
        help="memory of the machine, for weights and cache (default: the available memory); with --engine vllm the memory "
        "that VLLM_CPU_KVCACHE_SPACE gives to the cache alone",
    )
    add("--bandwidth", type=_gigabytes, metavar="GB/S", help="read bandwidth of the machine (default: measured)")
    add("--weights", type=_gigabytes, metavar="GB", help="size of the model's weights (default: those of a GGUF file)")
    add(
        "--weights-read",
        type=_gigabytes,
        metavar="GB",
        help="weights that one token reads in a mixture of experts (default: all, or the share in a GGUF file)",
    )
    add(
        "--engine",
        choices=["kvfast", "vllm"],
        default="kvfast",
        help="caches to plan for: kvfast's own, or vLLM's with kvfast's formats (default: kvfast)",
    )
    add("--drafts", metavar="MODEL", help="for vllm: a draft model, or the number of the model's own layers that draft (MTP)")
    add("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=_later("plan", "run_plan"))


def _add_bench(commands):
    parser = commands.add_parser(
        "bench",
        help="measure how fast attention is on this machine",
        description="Measure attention, this machine's read bandwidth, and its peak rates of integer and float arithmetic. "
        "Takes about two minutes.",
    )
    add = parser.add_argument
    add("--work", metavar="LIST", help="decode, cached, batch, prefill, append, read, quantize, dequantize (default: decode,prefill)")
    add("--model", metavar="NAME", help="shape of this model: Llama-3-8B (default), Llama-3.2-1B, SmolLM2-135M, Qwen3-30B-A3B")
    add("--formats", metavar="LIST", help="formats of the caches, with commas; or all (default: float16,int8,k8v4,int4)")
    add("--rows", default="random", metavar="LIST", help="random (default), real: of SmolLM2-135M on a text, computed once; or both")
    add("--contexts", type=_numbers, metavar="LIST", help="tokens (default: 1024,4096,16384,65536; for prefill up to 16384)")
    add("--tokens", type=_positive, metavar="N", help="queries of a prefill call, tokens of an append call (default: 512)")
    add("--sequences", type=_positive, metavar="N", help="sequences of a batch call (default: 16)")
    add("--threads", type=_numbers, metavar="LIST", help="(default: 1, and all CPUs; with --scaling 1, 2, 4 and so on)")
    add(
        "--scaling",
        action="store_true",
        help="time over threads of one token, a batch and a prompt at 4,096 tokens, int8 and int4; --plot draws it with the bounds",
    )
    add("--stream", action="store_true", help="whether one token waits for memory: its time in cache, by bandwidth, and from memory")
    add("--rounds", type=_positive, metavar="N", help="timed rounds (default: 3 to 15, for about a second)")
    add("--megabytes", type=_positive, metavar="N", help="megabytes that a decode call reads at least (default: 512)")
    add("--short", action="store_true", help="fewer contexts, in half a minute")
    add("--json", metavar="FILE", help="write the results as JSON")
    add(
        "--report",
        metavar="FILE",
        help="measure every tier of this processor, and write JSON to send to us: processor, versions, medians; no name or path",
    )
    add("--plot", metavar="FILE", help="draw time per token over context, and the memory wall: a PNG, SVG or PDF file")
    parser.set_defaults(run=_later("bench.command", "run_bench"), extras={"rich": "bench"})


def _add_llama_cpp(commands):
    parser = commands.add_parser("llama-cpp", help="build kvfast's attention for llama.cpp")
    parser.set_defaults(run=lambda args: parser.print_help())
    parser = parser.add_subparsers(metavar="command").add_parser(
        "build",
        help="build it for the ggml that is installed",
        description="Compile the backend of ggml that kvfast.llama_cpp.load() loads, and print its path.",
    )
    add = parser.add_argument
    add(
        "--source",
        metavar="DIR",
        help="sources of llama.cpp, in the version of the libraries (default: those of llama-cpp-python, fetched by pip)",
    )
    add("--libraries", metavar="DIR", help="folder of libggml-base.so (default: that of llama-cpp-python)")
    add("--out", metavar="FILE", help="the file to write (default: one in the user's cache)")
    parser.set_defaults(run=_run_llama_cpp_build)


def _add_info(commands):
    parser = commands.add_parser("info", help="print how kvfast runs on this machine")
    parser.set_defaults(run=lambda args: kvfast.show_config())


def _later(module, name):
    """A function of a module that is imported when the command runs."""
    return lambda args: getattr(importlib.import_module(f"kvfast.tools.cli.{module}"), name)(args)


def _run_llama_cpp_build(args):
    from kvfast.llama_cpp import build

    print(build(args.source, args.libraries, args.out))


def _add_model_arguments(parser, kinds="a GGUF file"):
    add = parser.add_argument
    add("--model", metavar="FILE", help=f"{kinds} (default: SmolLM2-135M-Instruct, fetched once)")
    add("--k-dtype", metavar="DTYPE", help="format of keys, in place of that of --dtype")
    add("--v-dtype", metavar="DTYPE", help="format of values, in place of that of --dtype")
    add("--calibration", metavar="FILE", help="store keys in the bases of this file, which `calibrate` wrote")
    add("--threads", type=_positive, help="threads to compute with (default: all CPUs)")


def _positive(text):
    return _natural(text, 1)


def _gigabytes(text):
    try:
        value = float(text) * 1e9
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of gigabytes above 0")
    return int(value)


def _numbers(text):
    return [_positive(part) for part in text.split(",")]


def _natural(text, least=0):
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not an integer of at least {least}")
    return value
