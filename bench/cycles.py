"""How many cycles the loops of products take on ARM processors, counted by LLVM's model of each (llvm-mca); nothing is measured.

    python bench/cycles.py                                      print a table
    python bench/cycles.py --json bench/cycles.json             and write what docs/tables.py reads

Compiles the loops of kvfast/simd with a cross compiler, cuts them out of the assembly, and runs llvm-mca of LLVM 19 or newer. The model
has no caches and no mispredicted branches: it tells what the units of a core take if all bytes are in its first cache.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIMD = ROOT / "kvfast" / "simd"
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-S", "-x", "c", "-I", str(SIMD), "-", "-o", "-"]

CORES = {"neoverse-n1": "Neoverse N1", "apple-m1": "Apple M1", "neoverse-v1": "Neoverse V1", "neoverse-v2": "Neoverse V2"}
HAVE_MATRIX_PRODUCTS = ("neoverse-v1", "neoverse-v2")
TIERS = {
    "neon_dotprod": (["KV_DOTPROD"], "arch=armv8.2-a+dotprod"),
    "neon_i8mm": (["KV_I8MM"], "arch=armv8.2-a+i8mm"),
    "neon_bf16": (["KV_I8MM", "KV_BF16"], "arch=armv8.2-a+i8mm+bf16"),
}

HEAD_DIM, TOKENS = 128, 64
LOOPS = {
    "int8": "KV(dot_lines)(base, &block, tile_bytes, lines, 0, 0, KV_INT8, x, {rows}, INT_VECTORS, ahead, 1, out);",
    "int4-plain": "KV(dot_lines)(base, &block, tile_bytes, lines, 0, 0, KV_INT4, x, {rows}, INT_VECTORS, ahead, 1, out);",
    "int4": "KV(dot_key_units)(base, 0, tile_bytes, lines, order, KV_INT4, x, {rows}, INT_VECTORS, ahead, 1, out);",
    "bfloat16": "KV(scores_floating)(side, queries, {rows}, base, lines, 0, streams, (float *)out, KV_BFLOAT16);",
}
ROWS = (1, 4)
# The tiers in which a loop differs.
USUAL = dict.fromkeys(LOOPS, ("neon_dotprod", "neon_i8mm")) | {"bfloat16": ("neon_dotprod", "neon_bf16")}
UNITS = {"V": "vectors", "L": "loads"}  # by the letter that LLVM's model gives them
TURNS = 200
BRANCH = re.compile(r"\t(?:b\.?\w*|cbn?z|tbn?z)\t(?:.*, )?(\.L\w+)$")
PRODUCT = re.compile(r"\t(sdot|usmmla|fmla|bfmmla)\t")
# Activations times codes, or queries times keys, of an instruction. Those by codes take two parts of an activation.
PRODUCTS_OF = {"sdot": 8, "usmmla": 16, "fmla": 4, "bfmmla": 16}


def source(tier):
    """C with one function for each loop, of a tier's own headers."""
    switches, target = TIERS[tier]
    headers = re.findall(r'#include "(vectors/\w+\.inc\.h|coding/\w+\.inc\.h)"', (SIMD / "tier.inc.h").read_text("utf-8"))
    headers = headers[: headers.index("vectors/floating.inc.h") + 1]
    lines = ['#include "common.h"', f'#pragma GCC target("{target}")']
    lines += ["#define KV(name) name##_loops", "#define kv_prefetch_level 1"]
    lines += [f"#define {switch}" for switch in switches]
    lines += [f'#include "{header}"' for header in ("isa/vec_neon.h", *headers)]
    parameters = (
        "const kv_side *side, const kv_queries *queries, const kv_ahead *streams, const kv_key_order *order, const char *base, "
        "ptrdiff_t tile_bytes, int lines, const int8_t *x, const char *ahead, vi out[KV_QUAD][4]"
    )
    for name, call in LOOPS.items():
        for rows in ROWS:
            lines.append(
                f"void {function(name, rows)}({parameters}) {{ const ptrdiff_t block = 0; (void)block; {call.format(rows=rows)} }}"
            )
    return "\n".join(lines) + "\n"


def function(name, rows):
    return f"loop_{name.replace('-', '_')}_{rows}"


def loop_of(assembly, name):
    """The instructions of the loop with the most products of a function, its branch at the end.

    What a branch forward skips is left out: prefetches that only some turns make.
    """
    body = assembly.split(f"\n{name}:\n")[1].split(f"\n\t.size\t{name}")[0].split("\n")
    labels = {line[:-1]: at for at, line in enumerate(body) if re.fullmatch(r"\.L\w+:", line)}
    spans = {}  # by their label; a turn that makes no prefetch branches back first
    for at, line in enumerate(body):
        branch = BRANCH.match(line)
        if branch and labels.get(branch[1], at) < at and any(map(PRODUCT.match, body[labels[branch[1]] : at])):
            spans.setdefault(branch[1], (labels[branch[1]], at + 1))
    inner = [
        one for one in spans.values() if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in spans.values())
    ]
    loops = [body[start:stop] for start, stop in inner]
    if not loops:
        raise SystemExit(f"{name} has no loop with products: this script does not fit the kernels")
    most = max(loops, key=lambda loop: sum(PRODUCTS_OF[found[1]] for found in map(PRODUCT.match, loop) if found))
    kept, at = [], 0
    while at < len(most):
        line = most[at]
        if line.startswith("\t") and not line.startswith("\t."):
            kept.append(line)
        branch = BRANCH.match(line)
        end = most.index(f"{branch[1]}:") if branch and f"{branch[1]}:" in most else 0
        at = end if end > at and not any(map(PRODUCT.match, most[at:end])) else at + 1
    return kept


def count(mca, core, loop):
    """Cycles of a turn of a loop on a core, and what they are spent on."""
    command = [mca, "-mtriple=aarch64", f"-mcpu={core}", "-mattr=+dotprod,+i8mm,+bf16", f"-iterations={TURNS}", "--json"]
    text = "\n".join(re.sub(r"\.L\w+$", "0", line) for line in loop)
    out = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    found = json.loads(out)
    region, units = found["CodeRegions"][0], found["TargetInfo"]["Resources"]
    summary = region["SummaryView"]
    cycles = summary["TotalCycles"] / TURNS
    pressure = dict.fromkeys(units, 0.0)
    for one in region["ResourcePressureView"]["ResourcePressureInfo"]:
        if one["InstructionIndex"] == len(loop):  # the sums
            pressure[units[one["ResourceIndex"]]] += one["ResourceUsage"]
    busiest = max(pressure, key=pressure.get)
    unit = next((name for letter, name in UNITS.items() if f"Unit{letter}" in busiest), busiest)
    parts = {"issue": summary["TotaluOps"] / TURNS / summary["DispatchWidth"], unit: pressure[busiest]}
    reason = max(parts, key=parts.get)
    if parts[reason] < 0.9 * cycles:
        reason = "latency"
    return cycles, reason


def loops(compiler):
    """By tier, keys and query rows the instructions of each loop."""
    found = {}
    for tier in TIERS:
        done = subprocess.run([compiler, *FLAGS], input=source(tier), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{compiler} could not compile the loops of {tier}:\n{done.stderr[-2000:]}")
        for name in LOOPS:
            for rows in ROWS:
                found[tier, name, rows] = loop_of(done.stdout, function(name, rows))
    return found


def results(mca, compiler):
    found, counted = loops(compiler), []
    for name in LOOPS:
        for rows in ROWS:
            for core, title in CORES.items():
                for tier in TIERS:
                    if tier not in USUAL[name] or (tier != "neon_dotprod" and core not in HAVE_MATRIX_PRODUCTS):
                        continue
                    loop = found[tier, name, rows]
                    products = [found[1] for found in map(PRODUCT.match, loop) if found]
                    each = PRODUCTS_OF[products[0]] // (2 if products[0] == "bfmmla" and rows == 1 else 1)  # of two rows
                    turns = HEAD_DIM * TOKENS * rows // (len(products) * each)
                    cycles, bound = count(mca, core, loop)
                    one = {"keys": name, "rows": rows, "core": title, "tier": tier, "instructions": len(loop)}
                    counted.append(one | {"products": len(products), "turns": turns, "cycles": round(cycles * turns), "bound": bound})
    return counted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the counts as JSON")
    parser.add_argument("--mca", default="llvm-mca-19", help="the program (default: llvm-mca-19)")
    parser.add_argument("--compiler", default="aarch64-linux-gnu-gcc", help="GCC for 64-bit ARM (default: aarch64-linux-gnu-gcc)")
    args = parser.parse_args()
    for program in (args.mca, args.compiler):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed; Debian has it in llvm-19 or gcc-aarch64-linux-gnu")
    rows = results(args.mca, args.compiler)
    for one in rows:
        print(*one.values(), sep="\t")
    if args.json:
        sys.path.insert(0, str(ROOT))
        from kvfast.cli.bench.json_file import write_json

        versions = [
            re.search(pattern, subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout)[1]
            for program, pattern in ((args.mca, r"LLVM version ([\d.]+)"), (args.compiler, r"\) ([\d.]+)"))
        ]
        about = {"llvm": versions[0], "gcc": versions[1], "head_dim": HEAD_DIM, "tokens": TOKENS}
        write_json(args.json, about | {"results": rows})


if __name__ == "__main__":
    main()
