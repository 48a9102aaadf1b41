"""vLLM with kvfast as its KV cache, compared with vLLM's own backend: speed and capacity.

    pip install -e ".[vllm,llama]"
    python bench/bench_vllm.py                          # SmolLM2-135M
    python bench/bench_vllm.py --model 1B               # a Llama of 1.2 billion random weights
    python bench/bench_vllm.py --attention              # only the kernels, seconds
    python bench/bench_vllm.py --context 2000 --rounds 3 --requests 16    # shorter

Each contender is an engine in a process of its own. Rounds are interleaved: one engine works at a time, each in its turn, and ratios
are medians over rounds, with the time of vLLM's own bfloat16 cache in the same round as 1. Where other programs use the machine, the fastest
rounds say more.

- step: one token of each of several sequences at a long context. The cache is filled with random keys and values.
- first token: of a prompt of the same length, computed whole.
- capacity: tokens that fit the same memory.
- "no attention" stores nothing and attends to nothing: what the engine and the model's weights take, the bound for every cache.
- throughput: requests at a cache that is too small for bfloat16, until all are done, with random prompts.
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

# Name of each contender: (whether kvfast is on, kv_cache_dtype).
CONTENDERS = {
    "vLLM": ("0", "auto"),
    "vLLM fp8": ("0", "fp8"),
    "kvfast bfloat16": ("1", "auto"),
    "kvfast int8": ("1", "int8_per_token_head"),
    "kvfast k8v4": ("1", "turboquant_k8v4"),
    "kvfast int4": ("1", "int4_per_token_head"),
    "no attention": ("1", "int8_per_token_head"),
}
BASE = "vLLM"
BLOCK = 64
LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}


def save_model(name, folder):
    """A folder that vLLM loads: of SmolLM2-135M, from kvfast's GGUF file, or of a configuration alone. Returns its load_format."""
    from transformers import LlamaConfig

    if name == "1B":
        LlamaConfig(**LLAMA_1B, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
        return "dummy"
    from llama_folder import save_folder

    from kvfast import llama

    save_folder(llama.load()[0], folder)
    return "auto"


# In the process of a contender. ------------------------------------------------------------------------------------------------


def work(connection, name, folder, load_format, given, memory):
    """Answer the parent's calls of methods of `Engine`."""
    switch, dtype = CONTENDERS[name]
    os.environ |= {
        "KVFAST_VLLM": switch,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if given.one_thread:
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would be the memory of all
    engine = Engine(folder, load_format, dtype, given, memory)
    if name == "no attention":
        from kvfast.engines.vllm.backend import KVFastImpl

        KVFastImpl.do_kv_cache_update = lambda *arguments, **options: None
        KVFastImpl.forward = lambda self, layer, query, key, value, kv_cache, attn_metadata, output, **options: output
    connection.send("ready")
    while call := connection.recv():
        method, *arguments = call
        connection.send(getattr(engine, method)(*arguments))


class Engine:
    def __init__(self, folder, load_format, dtype, given, memory):
        from vllm import LLM

        most = max(given.context + given.rounds * given.steps, given.longest + given.new_tokens) + 64
        self.llm = LLM(
            folder,
            load_format=load_format,
            dtype="bfloat16",
            kv_cache_dtype=dtype,
            max_model_len=most,
            skip_tokenizer_init=True,
            max_num_seqs=given.most,
            enforce_eager=not given.compile,
            kv_cache_memory_bytes=memory,
            block_size=BLOCK,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self.runner = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.clock = perf_counter
        if given.one_thread:
            import torch

            torch.set_num_threads(1)
            self.clock = process_time
        self.sequences, self.context, self.count = given.sequences, given.context, 0
        self.new_tokens = given.rounds * given.steps + 20

    def capacity(self):
        config = self.engine.vllm_config.cache_config
        return config.num_gpu_blocks * config.block_size

    def add(self, length, new_tokens):
        from vllm import SamplingParams, TokensPrompt

        self.count += 1
        draw = random.Random(self.count)
        ids = [draw.randrange(10, 1000) for _ in range(length)]
        parameters = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        self.engine.add_request(str(self.count), TokensPrompt(prompt_token_ids=ids), parameters)

    def drop_all(self):
        self.engine.abort_request([str(i) for i in range(1, self.count + 1)])
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def fill(self):
        """Start sequences whose prompts the engine takes for computed."""
        model = self.runner.model
        model.forward = self._instead_of_prompts
        for _ in range(self.sequences):
            self.add(self.context, self.new_tokens)
        started = set()
        while len(started) < self.sequences:
            started |= {output.request_id for output in self.engine.step() if output.outputs[0].token_ids}
        del model.forward
        for _ in range(2):
            self.engine.step()

    def _instead_of_prompts(self, input_ids, positions, *rest, **options):
        """Write random keys and values for the tokens of a step, and compute nothing else."""
        import torch
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        hidden = torch.zeros(len(positions), self.runner.model_config.get_hidden_size(), dtype=torch.bfloat16)
        for name, layer in context.no_compile_layers.items():
            slots = context.slot_mapping.get(name) if isinstance(context.slot_mapping, dict) else None
            if slots is not None:
                k, v = torch.randn(2, len(slots), layer.num_kv_heads, layer.head_size).bfloat16()
                layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)
        return hidden

    def steps(self, count):
        """Seconds of a step."""
        start = self.clock()
        for _ in range(count):
            self.engine.step()
        return (self.clock() - start) / count

    def first_token(self):
        self.add(self.context, 1)
        start = self.clock()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return self.clock() - start

    def throughput(self, requests, shortest, longest, new_tokens):
        draw = random.Random(0)
        for _ in range(requests):
            self.add(draw.randrange(shortest, longest), new_tokens)
        start = self.clock()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return self.clock() - start


def attention_alone(given):
    """Print the CPU time of one thread for one layer's attention: one token of each sequence, against vLLM's own kernel in bfloat16."""
    import numpy as np
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    import kvfast
    from kvfast.planning.vllm_blocks import VLLM_FORMATS

    torch.set_num_threads(1)
    n, per = given.sequences, -(-given.context // BLOCK)
    lens, starts = torch.full((n,), given.context, dtype=torch.int32), torch.arange(n + 1, dtype=torch.int32)
    table, slots = torch.arange(n * per, dtype=torch.int32).view(n, per), torch.arange(n * per * BLOCK).view(n, -1)[:, : given.context]
    newest, slots = slots[:, -1].numpy(), slots.flatten()

    def measure(model, q_heads, kv_heads, dim):
        k, v = torch.randn(2, len(slots), kv_heads, dim).bfloat16()
        q = torch.randn(n, q_heads, dim).bfloat16()
        out, isa = torch.zeros_like(q), _get_attn_isa(torch.bfloat16, BLOCK, dim)
        keys, values = torch.zeros(n * per, kv_heads, 2 * BLOCK, dim, dtype=torch.bfloat16).chunk(2, dim=2)
        common = {
            "sliding_window": -1,
            "softcap": 0,
            "alibi_slopes": None,
            "s_aux": None,
            "causal": True,
            "dynamic_causal": None,
            "k_scale": 1.0,
            "v_scale": 1.0,
            "kv_cache_dtype": "auto",
        }
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")

        def of_vllm():
            plan = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=n,
                num_heads=q_heads,
                num_kv_heads=kv_heads,
                head_dim=dim,
                seq_lens=lens,
                dtype=torch.bfloat16,
                query_start_loc=starts,
                causal=True,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=True,
                dynamic_causal=None,
                kv_cache_dtype="auto",
            )
            ops.cpu_attention_with_kv_cache(
                query=q,
                key_cache=keys,
                value_cache=values,
                output=out,
                query_start_loc=starts,
                seq_lens=lens,
                scale=dim**-0.5,
                block_table=table,
                scheduler_metadata=plan,
                **common,
            )

        runs = {"vLLM": of_vllm}
        for name in ("auto", "int8_per_token_head", "turboquant_k8v4", "int4_per_token_head"):
            pool = kvfast.PagedKVCache(1, kv_heads, dim, n * per, BLOCK, VLLM_FORMATS[name])
            pool.append_batch(0, k, v, pool.prepare_batch(table.numpy(), lens.numpy(), given.context * starts.numpy(), slots.numpy()))

            def of_kvfast(pool=pool):
                batch = pool.prepare_batch(table.numpy(), lens.numpy(), starts.numpy(), newest)
                pool.attend_batch(0, q, batch, out=out, num_threads=1)

            runs[f"kvfast {name}"] = of_kvfast
        times = {name: [] for name in runs}
        for _ in range(given.rounds + 1):
            for name, run in runs.items():
                start = process_time()
                run()
                times[name].append(process_time() - start)
        print(f"{model}: ms of CPU time of one thread for a layer, {n} sequences at {given.context} tokens, vLLM's kernel {isa}")
        for name, values_of in times.items():
            found, own = np.array(values_of[1:]), np.array(times["vLLM"][1:])  # the first round warms up
            print(f"  {name:28}{np.median(found) * 1e3:>8.2f}   {np.median(own / found):.2f}x")

    for model, shape in {"SmolLM2-135M": (9, 3, 64), "Llama-3.2-1B": (32, 8, 64), "Llama-3-8B": (32, 8, 128)}.items():
        measure(model, *shape)


# In the parent. ------------------------------------------------------------------------------------------------------------------


class Contender:
    def __init__(self, name, *arguments):
        self.name = name
        self.connection, other = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=work, args=(other, name, *arguments), daemon=True)
        self.process.start()
        other.close()
        self.connection.recv()  # ready

    def call(self, *call):
        self.connection.send(call)
        return self.connection.recv()

    def end(self):
        self.connection.send(None)
        self.process.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["SmolLM2", "1B"], default="SmolLM2")
    parser.add_argument("--contenders", default="vLLM,kvfast int8,kvfast int4", help=", ".join(CONTENDERS))
    parser.add_argument("--context", type=int, default=8000)
    parser.add_argument("--sequences", type=int, default=8, help="of a step; 0 leaves steps out")
    parser.add_argument("--rounds", type=int, default=7, help="of steps")
    parser.add_argument("--steps", type=int, default=5, help="of a round")
    parser.add_argument("--prompts", type=int, default=3, help="rounds of first tokens; 0 leaves them out")
    parser.add_argument("--requests", type=int, default=64, help="for the throughput; 0 leaves it out")
    parser.add_argument("--shortest", type=int, default=500, help="prompt of these requests")
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--most", type=int, default=32, help="requests in a step")
    parser.add_argument(
        "--tight", type=float, default=8, help="requests of average length that the bfloat16 cache of the throughput holds"
    )
    parser.add_argument("--compile", action="store_true", help="compile the model with PyTorch, which takes minutes")
    parser.add_argument("--one-thread", action="store_true", help="one thread, and its CPU time: for machines that others use")
    parser.add_argument("--attention", action="store_true", help="only one layer's attention, of one thread, without an engine")
    parser.add_argument("--json", help="a file for the figures")
    given = parser.parse_args()
    if given.attention:
        return attention_alone(given)
    names = [one.strip() for one in given.contenders.split(",")]
    assert BASE in names, f"--contenders needs {BASE}"
    os.environ["KVFAST_VLLM"] = "0"
    multiprocessing.set_start_method("spawn")
    found = {"capacity": {}, "step": {}, "first token": {}, "throughput": {}}
    with tempfile.TemporaryDirectory() as folder:
        load_format = save_model(given.model, folder)
        config = json.loads(Path(folder, "config.json").read_text())
        heads = config["num_key_value_heads"] * config["num_hidden_layers"]
        of_token = heads * 2 * 2 * config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])  # bytes in bfloat16
        arguments = folder, load_format, given
        if given.sequences or given.prompts:
            memory = of_token * (given.context + 1024) * max(given.sequences, 1)
            contenders = [Contender(name, *arguments, memory) for name in names]
            found["capacity"] = {one.name: [one.call("capacity")] for one in contenders}
            if given.sequences:
                for one in contenders:
                    one.call("fill")
                interleave(found["step"], contenders, given.rounds, "steps", given.steps)
                for one in contenders:
                    one.call("drop_all")
            interleave(found["first token"], contenders, given.prompts, "first_token")
            for one in contenders:
                one.end()
        if given.requests:
            memory = int(of_token * given.tight * ((given.shortest + given.longest) / 2 + given.new_tokens))
            memory = max(memory, of_token * (max(given.context, given.longest + given.new_tokens) + 1024))
            contenders = [Contender(name, *arguments, memory) for name in names]
            interleave(
                found["throughput"], contenders, 1, "throughput", given.requests, given.shortest, given.longest, given.new_tokens
            )
            for one in contenders:
                one.end()
    if given.json:
        Path(given.json).write_text(json.dumps({"arguments": vars(given), "found": found}, indent=1))
    report(given, names, found)


def interleave(found, contenders, rounds, *call):
    for _ in range(rounds):
        for one in contenders:
            found.setdefault(one.name, []).append(one.call(*call))


def report(given, names, found):
    import kvfast

    kvfast.show_config()
    print(
        f"\n{given.model}, bfloat16 weights, {'compiled' if given.compile else 'not compiled'}, "
        f"{'CPU time of one thread' if given.one_thread else 'all threads'}; figures and their ratios to {BASE}"
    )
    titles = {
        "capacity": f"tokens in the memory of {given.sequences} x {given.context + 1024} tokens of bfloat16",
        "step": f"ms of a step of {given.sequences} sequences at {given.context} tokens, median of {given.rounds} rounds",
        "first token": f"s until the first token of {given.context}, median of {given.prompts} rounds",
        "throughput": f"s for {given.requests} requests of {given.shortest} to {given.longest} and {given.new_tokens} tokens",
    }
    for key, title in titles.items():
        if not found[key]:
            continue
        print(f"\n{title}")
        for name in names:
            values, own = found[key][name], found[key][BASE]
            if key == "capacity":
                print(f"  {name:16}{values[0]:>10,}   {values[0] / own[0]:.2f}x")
                continue
            scale, ratio = 1000 if key == "step" else 1, median(b / a for a, b in zip(values, own))
            print(
                f"  {name:16}{median(values) * scale:>10.1f}   {ratio:.2f}x   fastest round {min(values) * scale:.1f}, "
                f"{min(own) / min(values):.2f}x"
            )


if __name__ == "__main__":
    main()
