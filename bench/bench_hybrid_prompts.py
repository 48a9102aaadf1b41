"""A prompt of a hybrid that outlives the process: a fresh one computes it, another takes keys, values and recurrent states from a store.

    pip install -e ".[transformers,files]"
    python bench/bench_hybrid_prompts.py                      # the layers of Qwen3-Next-80B, four of them, with random weights
    python bench/bench_hybrid_prompts.py --context 8192 --dtype int8 --rounds 3

Times are those from a prompt to its first token, of processes that have the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

PIECE = 256  # tokens of a piece of a prompt, each of which leaves a checkpoint


TINY = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32, "num_attention_heads": 4}
TINY |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


def model_of(is_tiny):
    """Shapes of Qwen3-Next-80B-A3B, with 16 of its 512 experts and a small vocabulary: neither is of a layer that has a state."""
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "num_experts": 16, "vocab_size": 4096} | (TINY if is_tiny else {})
    config = Qwen3NextConfig(**sizes, attn_implementation="kvfast", dtype=torch.float32)
    return Qwen3NextForCausalLM._from_config(config).eval()


def answer(folder, context, dtype, is_tiny):
    """Seconds to the first token, the tokens that the store had, the bytes of a checkpoint and of all, and the first token."""
    import numpy as np
    import torch

    import kvfast
    import kvfast.transformers

    model = model_of(is_tiny)
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 4096, (1, context)))
    with torch.no_grad():
        model(ids[:, :PIECE], cache=kvfast.transformers.KVFastCache(model.config, dtype))  # what a process does once
        with kvfast.PromptCache(folder, chunk_tokens=128, time_limit=60.0) as prompts:
            cache = kvfast.transformers.KVFastCache(model.config, dtype, prompt_cache=prompts)
            begin = time.perf_counter()
            found = cache.restore_prompt(ids, "qwen3-next")
            for start in range(found, context, PIECE):
                logits = model(ids[:, start : start + PIECE], cache=cache, logits_to_keep=1).logits
            token, seconds = int(logits[0, -1].argmax()), time.perf_counter() - begin
            cache.save_prompt(ids, "qwen3-next")
            row = cache.rows[0]
            states = sum(one.nbytes for one in row.states_at().values())
            return {"seconds": seconds, "found": found, "state": states, "bytes": prompts.nbytes, "token": token}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--dtype", default="int4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="layers of a few elements, which only show that it works")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(answer(args.folder, args.context, args.dtype, args.tiny)))
        return
    ratios = []
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--folder", folder, "--context", str(args.context), "--dtype", args.dtype]
            command += ["--tiny"] * args.tiny
            computed, restored = (json.loads(subprocess.check_output(command, text=True).splitlines()[-1]) for _ in range(2))
        ratios.append(computed["seconds"] / restored["seconds"])
        print(
            f"computed {computed['seconds']:.2f} s, restored {restored['seconds']:.2f} s ({restored['found']} tokens), {ratios[-1]:.1f} times "
            f"sooner; the first tokens are {'the same' if computed['token'] == restored['token'] else 'others'}"
        )
    print(
        f"{statistics.median(ratios):.1f} times sooner (median of {args.rounds}); a checkpoint takes {computed['state'] / 2**20:.1f} MiB, "
        f"the store {computed['bytes'] / 2**20:.1f} MiB"
    )


if __name__ == "__main__":
    main()
