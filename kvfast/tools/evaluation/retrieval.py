"""Retrieval: a model must use facts that are hidden in a long text; how much worse does it with a compressed cache?

The text comes long before the questions, so recent tokens do not help. Errors in old tokens show in this task first.
"""

import math
from dataclasses import dataclass

import numpy as np

import kvfast
from kvfast.tools.evaluation.perplexity import CacheScore, log_softmax, predictor

NAMES = """
    Athens Baghdad Bangkok Barcelona Beijing Berlin Bogota Boston Brussels Bucharest Budapest Cairo Chicago Copenhagen
    Dallas Delhi Denver Dublin Geneva Glasgow Hamburg Havana Helsinki Houston Istanbul Jakarta Jerusalem Karachi Kiev Lagos
    Lima Lisbon London Madrid Manila Melbourne Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Oslo Ottawa Oxford
    Paris Prague Rome Santiago Seattle Seoul Shanghai Singapore Stockholm Sydney Tokyo Toronto Tunis Venice Vienna Warsaw
    Zurich
""".split()  # noqa: SIM905 - a list would have a line for each
DIGITS = 5
KINDS = {"retrieval": "numbers", "arithmetic": "sums", "code": "lines of code"}  # of tasks -> their answers
_QUESTION_CHUNK = 16  # up to this number of tokens see what each would see alone
_NORMAL = 1.96  # standard deviations of a 95 % interval


@dataclass(frozen=True)
class RetrievalTask:
    """A text with hidden sentences, then the questions in another order, each with its answer.

    Attributes
    ----------
    tokens : ndarray of int, shape (num_tokens,)
    prompt : int
        Tokens before the first question.
    answers : list of ndarray of int
        For each question, the positions of the tokens of the answer.
    """

    tokens: np.ndarray
    prompt: int
    answers: list


@dataclass(frozen=True)
class RetrievalScore:
    """Results of one cache on several tasks.

    Attributes
    ----------
    dtype, runtime : str
        As in `CacheScore`.
    num_answers : int
    log_prob, log_prob_float32 : float
        Mean log-probability of a token of an answer, a digit in most models, in nats, with this cache and with a float32 cache of the same runtime.
    difference, interval : float
        ``log_prob - log_prob_float32``, and half the width of its 95 % interval: 1.96 standard errors over the answers.
    num_exact, num_exact_float32 : int
        Answers in which every token was the most likely one after the true tokens before it.
    exact_low, exact_high : float
        95 % interval of the share of exact answers (Wilson 1927).
    bits_per_element : float
        As in `CacheScore`, at the end of the longest task.
    """

    dtype: str
    runtime: str
    num_answers: int
    log_prob: float
    log_prob_float32: float
    difference: float
    interval: float
    num_exact: int
    num_exact_float32: int
    exact_low: float
    exact_high: float
    bits_per_element: float
    name = CacheScore.name


def retrieval_task(tokenizer, text, num_tokens, num_pairs=24, seed=0, kind="retrieval"):
    """Hide sentences with a number at random places of a text, and ask for all of them at its end.

    Parameters
    ----------
    tokenizer : Tokenizer
    text : str
        Long enough to fill the tokens of `num_tokens` that the sentences leave.
    num_tokens : int
        Most tokens of the task, questions included.
    num_pairs : int
        Numbers to hide, at most one for each of `NAMES`.
    seed : int
        Seed of the numbers, and of their names, places and order.
    kind : {"retrieval", "arithmetic", "code"}
        Sentences with numbers, sums of two numbers, or assignments of code. Answers are the numbers, the sums and the right sides.

    Returns
    -------
    RetrievalTask

    Raises
    ------
    ValueError
        If the text is too short, if there are more pairs than names, or if the pairs do not fit.
    """
    if not 1 <= num_pairs <= len(NAMES):
        raise ValueError(f"num_pairs must be between 1 and {len(NAMES)}, got {num_pairs}")
    rng = np.random.default_rng(seed)
    names = rng.permutation(NAMES)[:num_pairs]
    numbers = rng.choice(np.arange(10 ** (DIGITS - 1), 10**DIGITS), num_pairs, replace=False)

    def encoded(part):
        ids = tokenizer.encode(part)
        return ids if tokenizer.bos_id is None else ids[1:]

    pairs = [[encoded(part) for part in _sentence(kind, *pair)] for pair in zip(names, numbers, strict=True)]
    needles = [[*stem, *value, *end] for stem, value, end in pairs]
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    room = num_tokens - len(start) - 2 * sum(map(len, needles))
    if room < num_pairs:
        raise ValueError(f"{num_pairs} pairs take {num_tokens - room} tokens, and there is room for {num_tokens}")
    hay = encoded(text[: 16 * room])[:room]
    if len(hay) < room:
        raise ValueError(f"the text has {len(hay)} tokens, and {room} are needed")
    tokens, last = list(start), 0
    for place, needle in zip(np.sort(rng.choice(room, num_pairs, replace=False)), needles, strict=True):
        tokens += [*hay[last:place], *needle]
        last = place
    tokens += hay[last:]
    prompt, answers = len(tokens), []
    for i in rng.permutation(num_pairs):
        stem, value, _ = pairs[i]
        answers.append(np.array([at for at, one in enumerate(value, len(tokens) + len(stem)) if tokenizer.decode([one]).strip()]))
        tokens += needles[i]
    return RetrievalTask(np.array(tokens), prompt, answers)


def _sentence(kind, name, number):
    """A hidden sentence up to its value, the value, and its end."""
    if kind == "code":
        return f"\n{name.lower()} =", f" load({number}, 'part{number % 7}.txt')", "\n"
    if kind == "arithmetic":
        first, second = number // 1000, number % 90 + 10
        return f"\n{name}: {first} + {second} =", f" {first + second}", ".\n"
    return f"\nThe secret number of {name} is", f" {number}", ".\n"


def retrieve(task, predict, *, chunk_size=512, progress=None):
    """Read a task with several caches.

    Parameters
    ----------
    task : RetrievalTask
    predict : callable
        As in `compare`: called with each chunk of tokens in turn. Returns a function that takes a slice of that chunk, and
        returns the logits after these tokens in each way.
    chunk_size : int
        Most tokens of a chunk before the questions; the questions come 16 at a time.
    progress : callable, optional
        As in `evaluate`.

    Returns
    -------
    ndarray of shape (ways, answers, 2)
        Mean log-probability of a token of the answer, and whether every token was the likeliest.
    """
    inputs = task.tokens[:-1]
    wanted = np.zeros(len(inputs), bool)
    wanted[np.concatenate(task.answers) - 1] = True
    log_probs, likeliest = {}, {}
    start = 0
    while start < len(inputs):
        end = min(start + chunk_size, task.prompt) if start < task.prompt else min(start + _QUESTION_CHUNK, len(inputs))
        chunk = inputs[start:end]
        logits = predict(chunk)
        for row in np.flatnonzero(wanted[start:end]):
            expected = task.tokens[start + row + 1]
            one = log_softmax(np.stack(list(logits(slice(row, row + 1))))[:, 0])
            log_probs[start + row + 1] = one[:, expected]
            likeliest[start + row + 1] = one.argmax(axis=1) == expected
        start = end
        if progress is not None:
            progress(len(chunk))
    means = [np.mean([log_probs[at] for at in answer], axis=0) for answer in task.answers]
    exact = [np.all([likeliest[at] for at in answer], axis=0) for answer in task.answers]
    return np.stack([np.stack(means, axis=1), np.stack(exact, axis=1)], axis=2)


def retrieve_with(model, task, caches, **options):
    """`retrieve` with a float32 cache and others, which are empty and made with `model.cache_shape`."""
    reference = kvfast.KVCache(*model.cache_shape, max_seq_len=len(task.tokens), dtype="float32")
    return retrieve(task, predictor(model, [reference, *caches]), **options)


def retrieval_scores(results, names, bits, runtime="kvfast"):
    """Scores of caches over several tasks: a list of `RetrievalScore`.

    `results` are of `retrieve`, one per task, the float32 cache first; `names` says what the other caches store, and `bits` how
    many bits per element.
    """
    found = np.concatenate(results, axis=1)
    (reference, reference_exact), count = found[0].T, found.shape[1]
    scores = []
    for name, each, (log_probs, exact) in zip(names, bits, np.moveaxis(found[1:], 2, 1), strict=True):
        differences = log_probs - reference
        spread = differences.std(ddof=1) if count > 1 else math.inf
        low, high = wilson_interval(int(exact.sum()), count)
        scores.append(
            RetrievalScore(
                dtype=name,
                runtime=runtime,
                num_answers=count,
                log_prob=float(log_probs.mean()),
                log_prob_float32=float(reference.mean()),
                difference=float(differences.mean()),
                interval=float(_NORMAL * spread / math.sqrt(count)),
                num_exact=int(exact.sum()),
                num_exact_float32=int(reference_exact.sum()),
                exact_low=low,
                exact_high=high,
                bits_per_element=each,
            )
        )
    return scores


def wilson_interval(successes, count):
    """95 % interval of a share: `successes` of `count` trials (Wilson, Journal of the American Statistical Association, 1927)."""
    share, square = successes / count, _NORMAL**2 / count
    centre, half = share + square / 2, _NORMAL * math.sqrt(share * (1 - share) / count + square / (4 * count))
    return max(0.0, (centre - half) / (1 + square)), min(1.0, (centre + half) / (1 + square))
