"""Prompts of vLLM in a store: what a fresh engine finds of them, and what happens when the store fails."""

import time
import warnings
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from servers import Proxy, redis_server
from vllm.lora.request import LoRARequest
from vllm_drafts import save_drafts
from vllm_engines import LENGTHS, answers, generate, in_engine, prompts, save_model, save_tokenizer, settle, stored, values
from vllm_server import get, storing, stream, vllm_server

from kvfast.engines.vllm.prompts import lookups as lookups_module
from kvfast.engines.vllm.prompts import settings
from kvfast.engines.vllm.prompts.figures import Figures
from kvfast.engines.vllm.prompts.lookups import Lookups
from kvfast.engines.vllm.prompts.settings import IDLE_WAIT
from kvfast.engines.vllm.prompts.transfers import Rates, Transfers
from kvfast.prompts import patient, weights
from kvfast.prompts.envelope import HEADER_BYTES, num_tokens_of
from kvfast.prompts.stores import open_store
from kvfast.prompts.weights import files_digest

# vLLM and PyTorch use parts of each other that are deprecated.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("figures")]

CHUNK = 128
# vLLM's own operator for the interleaved rotation of DeepSeek is wrong on CPUs.
RIGHT = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
OPTIONS = {"deepseek": RIGHT, "qwen3_next": {"dtype": "bfloat16"}}


@pytest.fixture
def figures(monkeypatch):
    """All that engines of this process have counted. They fetch whatever there is: these models compute as fast as they fetch."""
    monkeypatch.setattr(Transfers, "rates", lambda self: None)
    total, add = Counter(), Figures.add

    def also(self, **counts):
        total.update(counts)
        add(self, **counts)

    monkeypatch.setattr(Figures, "add", also)
    return total


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", "auto"),
        ("llama", "int8_per_token_head"),
        ("llama", "int4_per_token_head"),
        ("deep", "turboquant_4bit_nc"),
        ("lfm2", "int8_per_token_head"),
        pytest.param("qwen3_next", "int8_per_token_head", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", "int4_per_token_head", marks=pytest.mark.exhaustive),
        ("gemma3", "int8_per_token_head"),
        ("gemma3", "int4_per_token_head"),
        ("deepseek", "int4_per_token_head"),
    ],
)
def test_a_fresh_engine_finds_prompts(folder_of, tmp_path, figures, model, dtype):
    """With the tokens of vLLM's own prefix cache; with float rows, of those that it has as codes alone, after other prompts. Windows,
    hybrid groups, blocks of two sizes, latent rows, and recurrent states, which are stored where a step ends at the end of a block."""
    options = {"kv_cache_dtype": dtype} | OPTIONS.get(model, {})
    fillers = prompts([130] * 24, seed=1) if dtype == "int4_per_token_head" and model != "deepseek" else []

    def use(llm):
        passes = [[generate(llm, [one])[0] for one in prompts()] for _ in range(2)]
        for one in fillers:
            generate(llm, [one], 1)
        return *passes, [generate(llm, [one])[0] for one in prompts()] if fillers else passes[1]

    first, again, later = in_engine(
        folder_of(model), use, **{"max_num_batched_tokens": 256} | options, kv_transfer_config=stored(tmp_path)
    )
    chunk = 256 if (model, dtype) == ("qwen3_next", "int4_per_token_head") else CHUNK  # vLLM's block, or the default
    restored = sum((n - 1) // chunk * chunk for n in LENGTHS)
    # With a matrix unit alone, vLLM has a prefix cache for latents.
    again_restored = restored if model == "deepseek" and not torch.cpu._is_amx_tile_supported() else 0
    assert figures["num_restored_tokens"] == again_restored
    assert figures["num_prompts"] == (2 + bool(fillers)) * len(LENGTHS) + len(fillers) and figures["bytes_written"] > 0
    figures.clear()
    assert answers(folder_of(model), tmp_path, **options) == [later]
    assert figures["num_restored_tokens"] == restored
    assert figures["num_hits"] == 3 and figures["num_failures"] == figures["num_dropped"] == figures["bytes_written"] == 0
    assert first == again
    figures.clear()
    if (model, dtype) == ("llama", "int8_per_token_head"):
        assert answers(folder_of(model), **options) == [first] and not figures
        assert answers(folder_of(model), tmp_path, **options, dtype="bfloat16") and not figures["num_hits"]


def test_answers_are_stored_and_known_again(folder_of, tmp_path, figures):
    """A conversation: the second prompt holds the first answer. Two requests of one beginning store it once."""
    [begin], tails = prompts((200,)), prompts((30, 40), seed=1)

    def talk(llm):
        one, _ = generate(llm, [begin + tail for tail in tails], 120)
        longer = [*begin, *tails[0], *one, *tails[1]]
        return longer, generate(llm, [longer], 8)

    options = {"kv_cache_dtype": "int8_per_token_head", "block_size": 32}
    longer, expected = in_engine(folder_of("llama"), talk, kv_transfer_config=stored(tmp_path), **options)
    # The common chunk, one of each text with its answer, one of the second prompt.
    assert len(values(tmp_path)) == 1 + 2 + (len(longer) // CHUNK - 2)
    figures.clear()
    assert (
        in_engine(folder_of("llama"), lambda llm: generate(llm, [longer], 8), kv_transfer_config=stored(tmp_path), **options)
        == expected
    )
    assert figures["num_restored_tokens"] == (len(longer) - 1) // CHUNK * CHUNK


def test_what_others_have_stored_is_not_found(folder_of, tmp_path, figures, monkeypatch):
    """Another salt, secret, model or adapter; part of a prompt."""
    from vllm import SamplingParams, TokensPrompt

    [prompt] = prompts((400,))

    def use(llm):
        def restored(ids, **more):
            figures.clear()
            settle(llm)
            parameters = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
            llm.generate([TokensPrompt(prompt_token_ids=ids, **more)], parameters, use_tqdm=False)
            return figures["num_restored_tokens"]

        assert restored(prompt) == 0
        assert restored(prompt) == 384 and restored(prompt[:384]) == 256 and restored(prompt[:200] + prompt[:100]) == 128
        assert restored(prompt[1:]) == 0
        assert restored(prompt, cache_salt="alice") == 0
        assert restored(prompt, cache_salt="alice") == 384 and restored(prompt, cache_salt="bob") == 0

    options = {"kv_cache_dtype": "int8_per_token_head"}
    in_engine(folder_of("llama"), use, kv_transfer_config=stored(tmp_path), **options)
    monkeypatch.setenv("KVFAST_PROMPT_SECRET", "hunter2")
    in_engine(folder_of("llama"), use, kv_transfer_config=stored(tmp_path), **options)


def test_blocks_of_another_format_have_other_keys(folder_of, tmp_path, figures, monkeypatch):
    """Also under the same name, where the first chunk of a text has floats, too."""
    counts = []
    for name, tail in (("int4_per_token_head", ""), ("int8_per_token_head", ""), ("int8_per_token_head", "1")):
        monkeypatch.setenv("KVFAST_TAIL", tail)
        answers(folder_of("llama"), tmp_path, most=1, kv_cache_dtype=name)
        counts.append(len(values(tmp_path)))
    assert counts == [counts[0], 2 * counts[0], 3 * counts[0]] and figures["num_restored_tokens"] == 0


def test_weights_tell_models_apart(folder_of, tmp_path):
    save_model("llama", tmp_path / "same")
    assert files_digest(tmp_path / "same") == files_digest(folder_of("llama"))
    damage(tmp_path / "same" / "model.safetensors", -1)
    assert files_digest(tmp_path / "same") != files_digest(folder_of("llama"))
    assert files_digest(tmp_path) is None


def test_an_adapter_that_was_replaced_is_another_one(tmp_path, monkeypatch):
    """Under the same path: what vLLM has loaded counts, and no block of the one before is stored. The scheduler reads no file."""
    monkeypatch.setattr(weights, "SETTLED", -1)
    lookups = object.__new__(Lookups)
    lookups._loaded, lookups._seen = {}, {}
    path = tmp_path / "live"

    def write(content, scale=16):
        time.sleep(0.02)  # until files get another time
        path.mkdir(exist_ok=True)
        (path / "adapter_model.safetensors").write_bytes(content)
        (path / "adapter_config.json").write_text(f'{{"lora_alpha": {scale}}}')

    def name(number, **more):
        return lookups._adapter(LoRARequest("live", number, str(path), **more))

    def known(number, num_local):
        request = SimpleNamespace(lora_request=LoRARequest("live", number, str(path)))
        status = weights.files_status(path)
        return SimpleNamespace(request=request, adapter=name(number), status=status, num_local=num_local)

    def may_store(number, num_local):
        return lookups._is_of_its_adapter(known(number, num_local))

    write(b"first")
    first = name(1)
    assert first == name(1) == name(2) and may_store(1, 128)
    write(b"other")
    assert name(1) is None and name(3) not in (None, first)  # a new number is loaded anew
    assert name(1, load_inplace=True) == name(1) == name(3)
    assert may_store(1, 0) and not may_store(1, 128)  # which may be blocks of the first one
    write(b"other", scale=32)
    said, lookups._parts = [], []
    monkeypatch.setattr(lookups_module.logger, "warning_once", lambda text, *values: said.append(text % values))
    assert lookups._look_up(known(3, 0), []).size == 0
    assert len(said) == 1 and "stores none: its files were replaced after vLLM had loaded it, as number 3" in said[0]
    assert name(3) is None and name(4) not in (None, first, name(1))
    assert Lookups._adapter(lookups, None) == ""
    one = known(4, 0)
    with monkeypatch.context() as patch:
        patch.setattr(lookups_module, "files_digest", pytest.fail)
        assert lookups._is_of_its_adapter(one)
        write(b"third")
        assert not lookups._is_of_its_adapter(one)
        (path / "adapter_model.safetensors").unlink()
        (path / "adapter_model.safetensors").symlink_to("nowhere")
        assert not lookups._is_of_its_adapter(one)
    write(b"third")
    one = known(5, 0)
    monkeypatch.setattr(weights, "SETTLED", 2e9)
    assert not lookups._is_of_its_adapter(one)  # a change now may leave no trace


@pytest.mark.parametrize(("model", "place"), [("llama", 384), ("gemma3", 640), ("lfm2", 640)])
def test_what_the_store_has_lost_is_computed(folder_of, tmp_path, figures, model, place):
    """A chunk that is gone, damaged or cut: known when it is looked up, or only when it is fetched."""
    given, options = prompts((700,)), {"kv_cache_dtype": "int8_per_token_head"}
    [expected] = answers(folder_of(model), tmp_path, given, **options)

    def use(llm):
        for change in (lambda path: path.unlink(), lambda path: damage(path, 300), lambda path: path.write_bytes(b"short")):
            settle(llm)
            paths = values(tmp_path)
            change(next(path for path in paths if num_tokens_of(path.read_bytes()[:HEADER_BYTES]) == place))
            figures.clear()
            assert generate(llm, given) == expected
            assert figures["num_restored_tokens"] - CHUNK * 5 <= 0 and figures["bytes_written"] > 0
            seen.append(figures["num_failures"])
            settle(llm)
            assert values(tmp_path) == paths

    seen = []
    in_engine(folder_of(model), use, kv_transfer_config=stored(tmp_path), **options)
    assert seen == [0, 1, 1]


def test_a_hybrid_goes_on_from_no_stale_state(folder_of, tmp_path, figures):
    """vLLM knows keys and values of a text from another one that begins so, and no state at their end. The store has a later state, which
    it loses. In this cache each text also takes blocks of the one before."""
    [text, tail] = prompts((700, 100))
    given, options = [text, text[:600] + tail], {"kv_cache_dtype": "int8_per_token_head", "num_gpu_blocks_override": 16}
    [expected] = answers(folder_of("lfm2"), tmp_path, given, **options)

    def use(llm):
        for change in (lambda path: path.unlink(), lambda path: damage(path, 300)):
            settle(llm)
            change(next(path for path in values(tmp_path) if num_tokens_of(path.read_bytes()[:HEADER_BYTES]) == 640))
            found = [generate(llm, [one])[0] for one in (given[1], text, given[1])]
            assert found == [expected[1], expected[0], expected[1]]
        assert figures["num_failures"]

    in_engine(folder_of("lfm2"), use, kv_transfer_config=stored(tmp_path), **options)


def test_drafts_have_values_of_their_own(folder_of, tmp_path, figures):
    """The layers of another model are parts of a chunk: engines with it and without do not take each other's chunks for damaged."""
    given, options = prompts((400,)), {"kv_cache_dtype": "int8_per_token_head"}
    config = save_drafts("eagle", folder_of("llama"), tmp_path)
    for more, restored in (({}, 0), ({"speculative_config": config}, 0), ({}, 384), ({"speculative_config": config}, 384)):
        figures.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a value")
            answers(folder_of("llama"), tmp_path / "store", given, **options, **more)
        assert figures["num_restored_tokens"] == restored and not figures["num_failures"]
    damage(tmp_path / "eagle" / "model.safetensors", -1)
    figures.clear()
    answers(folder_of("llama"), tmp_path / "store", given, **options, speculative_config=config)
    assert figures["num_restored_tokens"] == 0


def damage(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_store_that_fails_costs_time_alone(folder_of, tmp_path, figures):
    """Slow, silent, lying, cut, restarted, full and gone: the tokens are those of an engine without a store."""
    given, options = prompts((200, 400)), {"kv_cache_dtype": "int8_per_token_head"}
    [expected] = answers(folder_of("llama"), None, given, **options)

    def use(llm):
        for manner in ("plain", "delayed", "half-open", "lying", "cut", "plain"):
            proxy.manner = manner
            assert llm.reset_prefix_cache()
            assert [generate(llm, [one])[0] for one in given] == expected, manner
        server.kill()
        assert llm.reset_prefix_cache()
        assert [generate(llm, [one])[0] for one in given] == expected
        server.start()
        assert llm.reset_prefix_cache()
        assert [generate(llm, [one])[0] for one in given] == expected

    with redis_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as server, Proxy(server.port) as proxy:
        proxy.lie = b"$5\r\nhello\r\n" * 50
        in_engine(folder_of("llama"), use, kv_transfer_config=stored(f"redis://127.0.0.1:{proxy.port}", time_limit=0.5), **options)
    assert figures["num_restored_tokens"] > 0


def test_a_full_store_is_told_by_vllms_log_and_counted(folder_of, tmp_path, figures, monkeypatch):
    said = []
    for level in ("info", "warning"):
        monkeypatch.setattr(settings.logger, level, lambda text, *values, level=level: said.append((level, text % values)))
    monkeypatch.setattr(patient, "FIRST_PAUSE", 0.05)

    def use(llm):
        for i in range(20):
            generate(llm, prompts((400,), seed=i), 1)
            settle(llm)
        assert figures["num_refused"] >= 1 and figures["bytes_refused"] > 1000 * figures["num_refused"]
        store = open_store(url)
        assert figures["bytes_written"] == sum(entry.nbytes for entry in store.entries()) > 0
        store._call([(b"CONFIG", b"SET", b"maxmemory", b"100mb")])
        time.sleep(0.5)
        generate(llm, prompts((400,), seed=20), 1)
        settle(llm)
        store.close()

    with redis_server(tmp_path, "--maxmemory", "2mb", "--maxmemory-policy", "noeviction") as server:
        url = f"redis://127.0.0.1:{server.port}"
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "prompts")
            in_engine(folder_of("llama"), use, kv_transfer_config=stored(url), kv_cache_dtype="int8_per_token_head")
    told = [(level, text.partition(" command")[0]) for level, text in said if url in text]
    assert told == [
        ("info", f"kvfast keeps prompts in {url}"),
        ("warning", f"prompts are not saved, as {url} fails: it is full,"),
        ("info", f"prompts are saved again, as {url} is well"),
    ]


def test_requests_that_are_preempted_and_wait(folder_of, tmp_path, monkeypatch):
    """Ten blocks for four growing texts, with a store that has their prompts: each text is that of an engine without a store."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, original = [], Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *args, **options: preempted.append(args) or original(*args, **options))
    growing = prompts((150, 152, 154, 156))
    options = {"kv_cache_dtype": "int8_per_token_head", "num_gpu_blocks_override": 16, "block_size": 64, "max_model_len": 448}

    def use(llm):
        return generate(llm, growing, 120)

    expected = in_engine(folder_of("llama"), lambda llm: [generate(llm, [one], 120)[0] for one in growing], **options)
    for _ in range(2):
        preempted.clear()
        assert in_engine(folder_of("llama"), use, kv_transfer_config=stored(tmp_path), **options) == expected and preempted


def test_what_takes_longer_to_fetch_is_computed(folder_of, tmp_path, figures, monkeypatch):
    """Until the store might have got faster."""
    monkeypatch.setattr(Transfers, "rates", lambda self: Rates(900.0, 1000.0))

    def use(llm):
        for expected in (0, 0, 0, 128):
            settle(llm)
            figures.clear()
            generate(llm, prompts((200,)), 1)
            assert figures["num_restored_tokens"] == expected

    in_engine(folder_of("llama"), use, kv_transfer_config=stored(tmp_path), kv_cache_dtype="int8_per_token_head")


def test_an_idle_engine_leaves_the_interpreter_to_a_fetch(folder_of, tmp_path, monkeypatch):
    """While its only request waits, it takes few steps: a thousand of them slow a fetch to a hundredth."""
    from vllm.v1.core.sched.scheduler import Scheduler

    steps, schedule, fetch = [], Scheduler.schedule, Transfers._fetch
    monkeypatch.setattr(Scheduler, "schedule", lambda *args, **options: steps.append(args) or schedule(*args, **options))
    monkeypatch.setattr(Transfers, "_fetch", lambda *args: time.sleep(0.5) or fetch(*args))

    def use(llm):
        generate(llm, prompts((200,)), 1)
        settle(llm)
        assert llm.reset_prefix_cache()
        steps.clear()
        generate(llm, prompts((200,)), 1)

    in_engine(folder_of("llama"), use, kv_transfer_config=stored(tmp_path), kv_cache_dtype="int8_per_token_head")
    assert 1 < len(steps) < 0.5 / IDLE_WAIT + 20


@pytest.mark.parametrize(
    ("more", "message"),
    [({"chunk": 1}, "must have a url, and may have chunk_tokens"), ({"url": "ftp://there"}, "a store must be a folder or begin with")],
)
def test_a_wrong_configuration_is_refused(folder_of, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        in_engine(folder_of("llama"), print, kv_transfer_config=stored(**{"url": tmp_path} | more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be between 16 and 1048576, got 0"),
        ({"chunk_tokens": -5}, "chunk_tokens must be between 16 and 1048576, got -5"),
        ({"chunk_tokens": "128"}, "chunk_tokens must be"),
        ({"chunk_tokens": None}, "chunk_tokens must be"),
        ({"chunk_tokens": 1.5}, "chunk_tokens must be"),
        ({"max_bytes": -1}, "max_bytes must be"),
        ({"time_limit": 0}, "time_limit must be a positive number of seconds, got 0"),
        ({"time_limit": float("nan")}, "time_limit must be a positive number of seconds, got nan"),
        ({"time_limit": "5"}, "time_limit must be a positive number of seconds, got '5'"),
        ({"near": 5}, "near of kv_connector_extra_config must be a text, got 5"),
        ({"model": 5}, "model of kv_connector_extra_config must be a text, got 5"),
    ],
)
def test_a_wrong_option_is_refused_before_the_first_request(tmp_path, more, message):
    with pytest.raises((ValueError, TypeError), match=message):
        settings.Options.of(SimpleNamespace(kv_transfer_config=stored(tmp_path, **more))).open()


def test_another_connector_with_floats_outside_the_blocks_is_refused(folder_of, tmp_path):
    config = stored(tmp_path, connector="ExampleConnector")
    with pytest.raises(ValueError, match="would not send: choose KVFastConnector"):
        in_engine(folder_of("llama"), print, kv_transfer_config=config, kv_cache_dtype="int4_per_token_head")


@pytest.mark.exhaustive
@pytest.mark.parametrize("divided", ["tensor", "pipeline"])
def test_ranks_have_parts_of_their_own(tmp_path, divided):
    """Two processes that divide the heads of a model, or its layers."""
    save_model("llama", tmp_path)
    save_tokenizer(tmp_path)
    given, words = prompts((300, 500)), []
    options = [*storing(tmp_path / "store"), f"--{divided}-parallel-size", "2"]
    if divided == "pipeline":
        options.append("--no-enforce-eager")  # without its compiler vLLM 0.32 has no tensors between the ranks
    for _ in range(2):
        with vllm_server(tmp_path, *options) as (_, port):
            words.append([stream(port, one)[0] for one in given])
            metrics = get(port, "/metrics")
    assert words[0] == words[1]
    (restored,) = [line for line in metrics.splitlines() if line.startswith("vllm:kvfast_prompts_num_restored_tokens_total")]
    assert float(restored.split()[-1]) == 256 + 384
    sizes = [path.stat().st_size for path in values(tmp_path / "store")]
    assert len(sizes) == 2 * (2 + 4) and len(set(sizes)) == 1  # a chunk ends in the answer to the second prompt
