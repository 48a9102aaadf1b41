"""The command `serve` of `python -m kvfast`."""

import contextlib
import json
import os
import shlex
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import kvfast
from kvfast.engine import open_store, read_shape
from kvfast.tools.cli.settings import is_hugging_face
from kvfast.tools.llama.fetch import cache_dir, fetch_model

# --cache-type -> the number of the ggml type, elements of its blocks, and vLLM's format.
CACHE_TYPES = {"q8_0": (8, 32, "int8_per_token_head"), "q4_0": (2, 32, "int4_per_token_head"), "f16": (1, 1, "auto")}
# Tokens that are computed at once: those of a chunk, so that a prompt has the same bits from a store and without one.
BATCH = 64
LONGEST = 8192  # tokens of a context by default: those of some models would need more memory than there is
DEFAULT_STORE_SIZE = 4_000_000_000


def run_serve(args):
    """Serve a GGUF file by llama-cpp-python, or a model of Hugging Face by vLLM."""
    key = args.api_key_file and Path(args.api_key_file).read_text("utf-8").strip()
    if key == "":
        raise ValueError(f"{args.api_key_file} has no key")
    if args.model and is_hugging_face(args.model):
        _run_vllm(args, key)
        return
    path, context = checked_model(args)
    with contextlib.closing(_listening(args.host, args.port)) as listening:
        llm = load_model(args, path, context, checked_store(args), args.parallel or 1)
        _serve(args, path, llm, key, listening)


def _serve(args, path, llm, key, listening):
    import uvicorn

    from kvfast.engines.llama_cpp.serving import make_app

    print(
        f"serving {path.stem} at http://{args.host}:{listening.getsockname()[1]}/v1, {len(llm.contexts)} x "
        f"{llm.n_ctx():,} tokens of {args.cache_type}, "
        f"prompts in {llm.cache.store.url if llm.cache else 'no store'}",
        flush=True,
    )
    config = uvicorn.Config(make_app(path.stem, llm, key, args.max_waiting), timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])


def checked_model(args):
    """The file of a model, and the tokens of a context for it."""
    for package in ("llama_cpp", "fastapi", "uvicorn", "prometheus_client"):
        _need(package)
    path = _model_file(args.model) if args.model else fetch_model()
    return path, _checked_context(path, args)


def load_model(args, path, context, store, parallel=1):
    """A model with kvfast's attention and some contexts, and its prompts in a store if there is one."""
    _load_backend()
    from kvfast.engines.llama_cpp.served_llama import ServedLlama
    from kvfast.engines.llama_cpp.serving import tell
    from kvfast.llama_cpp import LlamaPromptCache

    if args.threads:
        kvfast.set_num_threads(args.threads)
    kind, threads = CACHE_TYPES[args.cache_type][0], kvfast.config()["num_threads"]
    options = {"n_ctx": context, "n_threads": threads, "n_threads_batch": threads, "n_batch": BATCH, "verbose": args.verbose}
    options["use_extra_bufts"] = _may_lay_out()
    try:
        llm = ServedLlama(str(path), parallel=parallel, flash_attn=True, type_k=kind, type_v=kind, **options)
    except ValueError as error:
        raise ValueError(f"{error}; --verbose shows why, and --cache-type f16 or less --context or --parallel may help") from None
    if store:
        prompts = LlamaPromptCache(store[0], llm, store[1], secret=os.environ.get("KVFAST_PROMPT_SECRET", "").encode())
        prompts.store.tell = tell
        for one in llm.contexts:
            one.set_cache(prompts.of(one))
    return llm


def _need(package):
    if find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def _model_file(model):
    try:
        with open(model, "rb") as file:
            is_gguf = file.read(4) == b"GGUF"
    except OSError as error:
        raise ValueError(f"{model}: {error.strerror}; give a GGUF file, or a name of Hugging Face like owner/name") from None
    if not is_gguf:
        raise ValueError(f"{model} is not a GGUF file; give the folder of a model that has others")
    return Path(model)


def _checked_context(path, args):
    """The tokens of the context, if the heads of the model fit into blocks of the cache's type."""
    try:
        shape = read_shape(path)
    except ValueError:  # an architecture that llama.cpp may know all the same
        return args.context or LONGEST
    block = CACHE_TYPES[args.cache_type][1]
    wrong = {dim for layer in shape.layers for dim in (layer.head_dim, layer.v_head_dim or layer.head_dim) if dim % block}
    if wrong:
        raise ValueError(
            f"heads of {max(wrong)} elements do not fit into the blocks of {block} of {args.cache_type}: use --cache-type f16"
        )
    return args.context or min(LONGEST, shape.context_length or LONGEST)


def _listening(host, port):
    """A socket that listens. Clients that connect before the model is loaded wait for it."""
    if port > 65535:
        raise ValueError(f"a port is at most 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise ValueError(f"cannot listen at {host}, port {port}: {why}; --port and --host choose another address") from None


def checked_store(args):
    """A store that answers, and the bound of its bytes; or None."""
    if args.store == "none":
        return None
    url = str(cache_dir() / "prompts") if args.store is None else args.store
    is_folder = "://" not in url or url.startswith("file:")
    if args.store_size is not None and not is_folder:
        raise ValueError("--store-size is for folders: a server limits itself")
    max_bytes = args.store_size or DEFAULT_STORE_SIZE if is_folder else None
    try:
        with contextlib.closing(open_store(url, max_bytes, timeout=1.0)) as store:
            store.contains_many(["c-" + 64 * "0"])
    except OSError as error:  # a StoreError
        raise ValueError(
            f"no answer of the store: {str(error).rstrip('.')}; --store names another one, and none does without"
        ) from None
    return url, max_bytes


def _load_backend():
    """Let llama.cpp compute attention with kvfast, if that can be."""
    from kvfast.llama_cpp import build, load

    try:
        try:
            load()
        except FileNotFoundError:
            print("compiling kvfast's attention for this llama.cpp, once", file=sys.stderr, flush=True)
            build()
            load()
    except (OSError, RuntimeError, ValueError) as error:
        print(f"note: llama.cpp computes attention without kvfast: {error}", file=sys.stderr)


def _may_lay_out():
    """Whether llama.cpp may lay out weights in ways of its own; where that crashes, say what helps."""
    from kvfast.engines.llama_cpp.amx import crashes_with_amx

    crashes = crashes_with_amx()
    if crashes:
        remedy = "CXXFLAGS=-fno-dse pip install --force-reinstall --no-deps --no-cache-dir llama-cpp-python"
        print(f"note: this llama.cpp crashes with AMX, so it computes without; a faster one: {remedy}", file=sys.stderr)
    return not crashes


def _run_vllm(args, key):
    """Become a server of vLLM."""
    if args.threads:
        raise ValueError("--threads is for GGUF files: VLLM_CPU_OMP_THREADS_BIND in the environment chooses the processors of vLLM")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
    command += ["--kv-cache-dtype", CACHE_TYPES[args.cache_type][2], "--host", args.host, "--port", str(args.port)]
    if args.parallel:
        command += ["--max-num-seqs", str(args.parallel)]
    if args.context:
        command += ["--max-model-len", str(args.context)]
    if store := checked_store(args):
        extra = {name: value for name, value in zip(("url", "max_bytes"), store) if value is not None}
        transfer = {"kv_connector": "KVFastConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        command += ["--kv-transfer-config", json.dumps(transfer)]
    print(shlex.join(command), flush=True)
    _need("vllm")
    os.execve(sys.executable, command, os.environ | ({} if key is None else {"VLLM_API_KEY": key}))
