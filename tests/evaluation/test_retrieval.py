"""Numbers hidden in a text: the tasks, their scores, and `python -m kvfast eval --task retrieval`."""

import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
pytest.importorskip("rich")

from command_line import run_here

import kvfast
from kvfast import llama
from kvfast.tools.evaluation.retrieval import (
    DIGITS,
    NAMES,
    RetrievalTask,
    retrieval_scores,
    retrieval_task,
    retrieve,
    retrieve_with,
    wilson_interval,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    runpy.run_path(Path(__file__).parents[1] / "data" / "tiny_gguf.py")["write_model"](path)
    return path


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("The one the other - then the others. " * 200, encoding="utf-8")
    return path


class Words:
    """A tokenizer with a token for each word and digit."""

    bos_id = 0

    def __init__(self):
        self.words = ["<s>"]

    def encode(self, text):
        pieces = "".join(f"\0{one}" if one.isdigit() or one in " .\n" else one for one in text).split("\0")
        for piece in pieces:
            if piece and piece not in self.words:
                self.words.append(piece)
        return [0, *(self.words.index(piece) for piece in pieces if piece)]

    def decode(self, ids):
        return "".join(self.words[one] for one in ids)


def test_a_task_hides_each_number_once_and_asks_for_it_once():
    words = Words()
    task = retrieval_task(words, "hay " * 3000, 2000, num_pairs=20, seed=3)
    told = [words.decode([one]) for one in task.tokens]
    assert len(task.tokens) <= 2000 and len(task.answers) == 20 and told[0] == "<s>"
    hidden, asked = ("".join(part) for part in (told[: task.prompt], told[task.prompt :]))
    assert hidden.count("The secret number of") == asked.count("The secret number of") == 20
    assert hidden.count("hay") > 500 and "hay" not in asked
    numbers = []
    for answer in task.answers:
        number = "".join(told[at] for at in answer)
        name = "".join(told[task.prompt : answer[0]]).rpartition("number of ")[2].removesuffix(" is ")
        assert len(answer) == DIGITS == len(number) and number.isdigit() and name in NAMES
        assert hidden.count(f"\nThe secret number of {name} is {number}.\n") == 1
        numbers.append(number)
    assert len(set(numbers)) == 20 and [hidden.index(one) for one in numbers] != sorted(hidden.index(one) for one in numbers)


@pytest.mark.parametrize(
    ("kind", "value"), [("arithmetic", r"\n(\w+): (\d+) \+ (\d+) = (\d+)\.\n"), ("code", r"\n(\w+) = (load\(.*\))\n")]
)
def test_other_kinds_hide_sums_and_code(kind, value):
    words = Words()
    task = retrieval_task(words, "hay " * 3000, 2000, num_pairs=9, seed=3, kind=kind)
    told = [words.decode([one]) for one in task.tokens]
    hidden, asked = (re.findall(value, "".join(part)) for part in (told[: task.prompt], told[task.prompt :]))
    assert len(hidden) == 9 and sorted(hidden) == sorted(asked) and hidden != asked
    answers = ["".join(told[at] for at in answer).replace(" ", "") for answer in task.answers]
    assert answers == [one[-1].replace(" ", "") for one in asked]
    assert kind == "code" or all(int(one[1]) + int(one[2]) == int(one[3]) for one in asked)


def test_a_seed_gives_a_task():
    tasks = [retrieval_task(Words(), "hay " * 900, 600, 4, seed) for seed in (5, 5, 6)]
    assert np.array_equal(tasks[0].tokens, tasks[1].tokens) and not np.array_equal(tasks[0].tokens, tasks[2].tokens)


@pytest.mark.parametrize(
    ("size", "pairs", "reason"),
    [
        (600, 0, "num_pairs must be between 1 and 64, got 0"),
        (600, 65, "num_pairs must be between 1 and 64, got 65"),
        (100, 4, "4 pairs take .* and there is room for 100"),
        (9000, 4, "the text has .* tokens, and .* are needed"),
    ],
)
def test_impossible_haystacks_are_refused(size, pairs, reason):
    with pytest.raises(ValueError, match=reason):
        retrieval_task(Words(), "hay " * 900, size, pairs)


def test_each_digit_is_scored_by_the_tokens_before_it():
    """Ways of which the first always knows the next token, and the second never."""
    rng = np.random.default_rng(0)
    task = RetrievalTask(rng.integers(0, 50, 90), 60, [np.arange(65, 70), np.arange(80, 85)])
    seen = []

    def predict(chunk):
        start = len(seen)
        seen.extend(chunk)

        def logits(rows):
            expected = task.tokens[1:][start:][rows]
            one = np.zeros((2, len(expected), 50), np.float32)
            one[0, np.arange(len(expected)), expected] = 100
            one[1, np.arange(len(expected)), (expected + 1) % 50] = 2
            return one

        return logits

    found = retrieve(task, predict, chunk_size=25)
    assert seen == task.tokens[:-1].tolist()
    assert np.allclose(found[0], [0, 1]) and np.allclose(found[1], [-math.log(49 + math.exp(2)), 0])


def test_scores_of_several_tasks():
    reference = np.array([[-0.1, 1], [-0.3, 1], [-0.2, 0]])
    other = reference - [[0.1, 1], [0.3, 0], [0.2, 0]]
    (score,) = retrieval_scores([np.stack([reference[:1], other[:1]]), np.stack([reference[1:], other[1:]])], ["int4"], [4.5])
    assert (score.dtype, score.num_answers, score.num_exact, score.num_exact_float32) == ("int4", 3, 1, 2)
    assert score.log_prob == pytest.approx(-0.4) and score.log_prob_float32 == pytest.approx(-0.2)
    assert score.difference == pytest.approx(-0.2) and score.interval == pytest.approx(1.96 * 0.1 / math.sqrt(3))
    assert (score.exact_low, score.exact_high) == wilson_interval(1, 3)


def test_interval_of_a_share():
    low, high = wilson_interval(8, 10)  # Agresti and Coull, The American Statistician 52 (1998)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-3), pytest.approx(0.9433, abs=1e-3))
    assert wilson_interval(0, 5)[0] == 0 and wilson_interval(5, 5)[1] == 1


def test_caches_of_a_model(model, text):
    net, tokenizer = llama.load(model)
    net.batch_invariant = True  # the two float32 caches of a batch then see the same bits
    task = retrieval_task(tokenizer, text.read_text(), 700, 3)
    caches = [kvfast.KVCache(*net.cache_shape, max_seq_len=len(task.tokens), dtype=dtype) for dtype in ("float32", "int4-plain")]
    done = []
    found = retrieve_with(net, task, caches, progress=done.append)
    assert found.shape == (3, 3, 2) and sum(done) == len(task.tokens) - 1
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    # Against the whole text in one pass.
    logits = net.logits(net.forward(task.tokens[:-1], kvfast.KVCache(*net.cache_shape, dtype="float32"))).astype(np.float64)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for answer, (log_prob, _) in zip(task.answers, found[0]):
        assert log_prob == pytest.approx(logits[answer - 1, task.tokens[answer]].sum() / DIGITS, abs=1e-4)


def test_command(model, text, tmp_path):
    args = ("eval", "--task", "retrieval", "--model", model, "--text", text, "--lengths", "500,700", "--seeds", 2, "--pairs", 3)
    code, out, err = run_here(*args, "--formats", "int8,int4", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["seeds"] == [0, 1] and [one["tokens"] for one in report["lengths"]] == [500, 700]
    for one in report["lengths"]:
        assert [score["dtype"] for score in one["results"]] == ["int8", "int4"]
        assert all(score["num_answers"] == 6 for score in one["results"])
    path = tmp_path / "report.json"
    code, out, err = run_here(*args, "--formats", "int8", "--report", path)
    one = json.loads(path.read_text("utf-8"))
    assert one["lengths"][0]["results"][0]["num_answers"] == 6 and one["model"]["name"] == "tiny"
    assert code == 0 and "3 numbers in 500 tokens, 2 times" in out and "95 % intervals" in out
    code, out, err = run_here(*args[:2], "code", *args[3:], "--formats", "int8")
    assert code == 0 and "3 lines of code in 700 tokens" in out


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--compress", "int8"), "not for --task retrieval"),
        (("--lengths", "1000000"), "the model's context is"),
        (("--pairs", "65"), "num_pairs must be between 1 and 64"),
    ],
)
def test_command_refuses(model, text, options, reason):
    code, _, err = run_here("eval", "--task", "retrieval", "--model", model, "--text", text, "--lengths", "500", *options)
    assert code == 1 and reason in err
