"""The commands `eval` and `calibrate` of `python -m kvfast`."""

import functools
import json
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

import kvfast
from kvfast import evaluation, llama
from kvfast.engine import size_text
from kvfast.tools.cli.bench.json_file import write_json
from kvfast.tools.cli.bench.report import about_machine
from kvfast.tools.cli.settings import is_hugging_face, set_threads, storage_of
from kvfast.tools.evaluation.compressed_prompts import evaluate_compressed, parse_methods
from kvfast.tools.evaluation.llama_cpp_caches import LlamaCpp, parse_cache_types
from kvfast.tools.evaluation.perplexity import FORMATS, bits_per_element, new_cache
from kvfast.tools.evaluation.plotting import check_folder, check_plot
from kvfast.tools.evaluation.report import as_rows, compression_table, plot_scores, reports_table, retrieval_table, score_table, show
from kvfast.tools.evaluation.retrieval import KINDS, retrieval_scores, retrieval_task, retrieve_with
from kvfast.tools.evaluation.wrapped import TimedCache
from kvfast.tools.llama.fetch import file_sha256


def run_eval(args):
    """Score the caches of `args.formats` on each of `args.text`; print a table, or JSON, of the means."""
    if args.compare:
        show(reports_table([json.loads(_read_text(path)) for path in args.compare]))
        return
    if args.report:
        check_folder(args.report)
    if args.model and is_hugging_face(args.model):
        for option, given in (("--task", args.task != "predict"), ("--compress", args.compress), ("--llama-cpp", args.llama_cpp)):
            if given:
                raise ValueError(f"{option} is for GGUF files")
    if args.task != "predict":
        return _run_task(args)
    if args.compress:
        return _run_compress(args)
    if args.prompt:
        raise ValueError("--prompt is for --compress")
    texts = [_read_text(path) for path in args.text]
    storages = [storage_of(name, args) for name in _format_names(args.formats)]
    types = parse_cache_types(args.llama_cpp) if args.llama_cpp else []
    if args.plot:
        check_plot(args.plot)
    path, model, tokenizer = _load(args)
    context = model.config.context_length
    if context and args.tokens > context:
        raise ValueError(f"--tokens is {args.tokens}; the model's context is {context}")
    all_tokens = [tokenizer.encode(text)[: args.tokens] for text in texts]
    rotated, per_text, seconds = [], [], []
    with _progress(sum(len(tokens) - 1 for tokens in all_tokens) * (2 if types else 1)) as progress:
        for tokens in all_tokens:
            caches = [TimedCache(new_cache(model, len(tokens), **storage)) for storage in storages]
            per_text.append(evaluation.evaluate(model, tokens, caches, chunk_size=args.chunk, progress=progress))
            seconds.append([cache.seconds for cache in caches])
        if types:
            with LlamaCpp(path, model.cache_shape) as peer:
                for tokens, scores in zip(all_tokens, per_text):
                    scores += peer.evaluate(tokens, types, progress=progress)
                rotated = peer.rotated

    more = {"llama_cpp_rotated": rotated} if types else {}
    if args.report:
        about = _about(path, model, texts) | {"chunk": args.chunk, **more}
        for text, tokens, scores, times in zip(about["texts"], all_tokens, per_text, seconds):
            text |= {"tokens": len(tokens), "results": as_rows(scores)}
            for row, time in zip(text["results"], times if any(times) else ()):  # transformers attends past them
                row["attention_seconds"] = round(time, 6)
        write_json(args.report, about)
    table = functools.partial(score_table, cache_shape=model.cache_shape)
    _report(args, path, per_text, "tokens predicted", table, [{}] * len(texts), **more)
    if types and not args.json:
        print("llama.cpp's rows compare with its own f32 cache; its weights are the same, in float32.")
        if rotated:
            print(f"Its log says that it rotates before it rounds: {', '.join(rotated)}.")


def _run_task(args):
    """Score the caches of `args.formats` on what `args.task` hides in `args.text`, length by length."""
    if args.compress or args.prompt or args.plot:
        raise ValueError(f"--compress, --prompt and --plot are not for --task {args.task}")
    if len(args.text) > 1:
        raise ValueError(f"--task {args.task} hides {KINDS[args.task]} in one text, got {len(args.text)}")
    text = _read_text(args.text[0])
    storages = [storage_of(name, args) for name in _format_names(args.formats)]
    types = parse_cache_types(args.llama_cpp) if args.llama_cpp else []
    path, model, tokenizer = _load(args)
    if max(args.lengths) > model.config.context_length:
        raise ValueError(f"--lengths has {max(args.lengths)}; the model's context is {model.config.context_length}")
    task_of = functools.partial(retrieval_task, tokenizer, text, num_pairs=args.pairs, kind=args.task)
    tasks = [[task_of(length, seed=seed) for seed in range(args.seeds)] for length in args.lengths]
    total = sum(len(task.tokens) - 1 for group in tasks for task in group) * (2 if types else 1)
    found = []
    with _progress(total) as progress:
        for group in tasks:
            results = []
            for task in group:
                caches = [kvfast.KVCache(*model.cache_shape, max_seq_len=len(task.tokens), **storage) for storage in storages]
                results.append(retrieve_with(model, task, caches, progress=progress))
            scores = retrieval_scores(results, [str(cache.dtype) for cache in caches], list(map(bits_per_element, caches)))
            if types:
                with LlamaCpp(path, model.cache_shape) as peer:
                    results = [peer.retrieve(task, types, progress=progress) for task in group]
                scores += retrieval_scores(results, list(map(str, types)), [sum(one.bits) / 2 for one in types], "llama.cpp")
            found.append(scores)
    by_length = [{"tokens": length, "results": [asdict(one) for one in scores]} for length, scores in zip(args.lengths, found)]
    result = {"task": args.task, "pairs": args.pairs, "seeds": list(range(args.seeds)), "lengths": by_length}
    if args.report:
        write_json(args.report, _about(path, model, [text]) | result)
    if args.json:
        print(json.dumps({"text": args.text[0]} | result, indent=2))
        return
    for length, scores in zip(args.lengths, found):
        print(f"{args.text[0]}: {args.pairs} {KINDS[args.task]} in {length:,} tokens, {args.seeds} times")
        show(retrieval_table(scores))
    print("log-prob of a token of the answers, in nats; +- and the range of exact answers are 95 % intervals")


def _run_compress(args):
    """Score the methods of `args.compress` on each of `args.text`."""
    for option, given in (("--llama-cpp", args.llama_cpp), ("--report", args.report), ("--calibration", args.calibration)):
        if given:
            raise ValueError(f"{option} is not for --compress")
    if args.formats != "all":
        raise ValueError("--formats is not for --compress, which takes formats in its own list")
    texts, methods = [_read_text(path) for path in args.text], parse_methods(args.compress)
    if args.plot:
        check_plot(args.plot)
    path, model, tokenizer = _load(args)
    texts = [tokenizer.encode(text)[: args.tokens] for text in texts]
    prompts = [args.prompt or len(tokens) - 512 for tokens in texts]
    for text, tokens, prompt in zip(args.text, texts, prompts):
        if not 1 <= prompt <= len(tokens) - 2:
            raise ValueError(f"{text}: of {len(tokens)} tokens, {prompt} cannot be compressed and at least two be left")
    with _progress(sum(map(len, texts)) - len(texts)) as progress:
        per_text = [
            evaluate_compressed(model, tokens, prompt, methods, chunk_size=args.chunk, progress=progress)
            for tokens, prompt in zip(texts, prompts)
        ]
    title = f"predictions after prompts of {', '.join(f'{prompt:,}' for prompt in prompts)} tokens"
    _report(args, path, per_text, title, compression_table, [{"prompt": prompt} for prompt in prompts])


def _report(args, path, per_text, title, table_of, abouts, **more):
    """Draw and print the means of the scores of all texts; `abouts` and `more` are what JSON has besides, of each text and of all."""
    means = [evaluation.mean_score(scores) for scores in zip(*per_text)]
    count, names = f"{means[0].num_predictions:,}", ", ".join(args.text)
    if args.plot:
        plot_scores(means, args.plot, f"{_name(path)}, {count} predictions")
    if args.json:
        by_text = [{"text": text, **about, "results": as_rows(scores)} for text, about, scores in zip(args.text, abouts, per_text)]
        print(json.dumps({"text": names, "chunk": args.chunk, "results": as_rows(means), "texts": by_text, **more}, indent=2))
        return
    print(f"{names}: {count} {title}; NLL and KL are means per token, in nats")
    show(table_of(means))


def _about(path, model, texts):
    """The part of a report that tells the model, the texts and the machine, without a word of the texts."""
    checksum = file_sha256(path) if Path(path).is_file() else model.sha256(path)
    of_model = {"name": _name(path), "sha256": checksum, **asdict(model.config)}
    of_texts = [{"sha256": sha256(text.encode()).hexdigest(), "characters": len(text)} for text in texts]
    about = about_machine()
    about["versions"] |= getattr(model, "versions", {})
    return about | {"model": of_model, "texts": of_texts}


def _name(path):
    """The name of a model's file or folder."""
    path = Path(path).absolute()
    return path.stem if path.is_file() else path.name


def _load(args):
    """Path, model and tokenizer of the arguments; sets the threads."""
    set_threads(args.threads)
    path = args.model or llama.fetch_model()
    if not args.model or not is_hugging_face(args.model):
        return path, *llama.load(path)
    from kvfast.tools.cli import hugging_face

    return path, *hugging_face.load(path, args.threads)


@contextmanager
def _progress(total):
    """Show a bar for `total` tokens, and give a function that takes the number of new ones."""
    columns = [BarColumn(), MofNCompleteColumn(), "tokens", TimeElapsedColumn(), "ETA", TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield functools.partial(bar.advance, bar.add_task("", total=total))


def _format_names(formats):
    """The names in a list with commas, each once, with `all` spelled out."""
    names = [name.strip() for name in formats.split(",")]
    return dict.fromkeys(known for name in names for known in (FORMATS if name == "all" else [name]))


def run_calibrate(args):
    """Write the calibration of a model on `args.text` to `args.out`."""
    check_folder(args.out)
    text = _read_text(args.text)
    set_threads(args.threads)
    model, tokenizer = llama.load(args.model)
    tokens = tokenizer.encode(text)[: min(args.tokens, model.config.context_length)]
    calibration = evaluation.calibrate_on_text(model, tokens)
    calibration.save(args.out)
    print(f"{calibration!r} of {len(tokens):,} tokens of {args.text}: {size_text(Path(args.out).stat().st_size)} in {args.out}")


def _read_text(path):
    with open(path, encoding="utf-8") as file:
        try:
            return file.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None
