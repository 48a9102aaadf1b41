"""How many cycles the loops of products take on processors, counted by LLVM's model of each (llvm-mca); nothing is measured.

    python bench/cycles.py                                      print a table
    python bench/cycles.py --json bench/cycles.json             and write what docs/tables.py reads

Compiles the loops of kvfast/simd in both precisions, with a cross compiler for ARM, cuts them out of the assembly, and runs llvm-mca of
LLVM 19 or newer. The model has no caches and no mispredicted branches: it tells what the units of a core take if all bytes are in its first
cache.
"""

import argparse
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIMD = ROOT / "kvfast" / "simd"
FLAGS = ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-S", "-x", "c", "-I", str(SIMD), "-", "-o", "-"]

CORES = {
    "neoverse-n1": "Neoverse N1",
    "apple-m1": "Apple M1",
    "neoverse-v1": "Neoverse V1",
    "neoverse-v2": "Neoverse V2",
    "znver3": "Zen 3",
    "znver4": "Zen 4",
    "alderlake": "Alder Lake",
    "skylake-avx512": "Skylake-X",
    "sapphirerapids": "Sapphire Rapids",
}
AVX512 = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
# The header, switches and instruction set of each tier, and the cores that run it.
TIERS = {
    "neon_dotprod": ("vec_neon.h", ["KV_DOTPROD"], "arch=armv8.2-a+dotprod", ("neoverse-n1", "apple-m1", "neoverse-v1", "neoverse-v2")),
    "neon_i8mm": ("vec_neon.h", ["KV_I8MM"], "arch=armv8.2-a+i8mm", ("neoverse-v1", "neoverse-v2")),
    "neon_bf16": ("vec_neon.h", ["KV_I8MM", "KV_BF16"], "arch=armv8.2-a+i8mm+bf16", ("neoverse-v1", "neoverse-v2")),
    "avx2": ("vec_avx2.h", [], "avx2,fma,f16c", ("znver3",)),
    "avx_vnni": ("vec_avx2.h", ["KV_AVX_VNNI"], "avx2,fma,f16c,avxvnni", ("alderlake",)),
    "avx512": ("vec_avx512.h", [], AVX512, ("skylake-avx512",)),
    "avx512_vbmi": ("vec_avx512.h", ["KV_VNNI", "KV_VBMI"], AVX512 + ",avx512vnni,avx512vbmi", ("znver4", "sapphirerapids")),
}

HEAD_DIM, TOKENS = 128, 64
LOOPS = {
    "int8": "KV(dot_lines)(base, &block, tile_bytes, lines, 0, 0, KV_INT8, x, {rows}, INT_VECTORS, ahead, 1, out);",
    "int4-plain": "KV(dot_lines)(base, &block, tile_bytes, lines, 0, 0, KV_INT4, x, {rows}, INT_VECTORS, ahead, 1, out);",
    "int4": "KV(dot_key_units)(base, 0, tile_bytes, lines, order, KV_INT4, x, {rows}, INT_VECTORS, ahead, 1, out);",
    "bfloat16": "KV(scores_floating)(side, queries, {rows}, base, lines, 0, streams, (float *)out, KV_BFLOAT16);",
    "values of int4": "KV(dot_lines)(base, &block, tile_bytes, lines, 0, 0, KV_GAUSS4, x, {rows}, INT_VECTORS, ahead, 1, out);",
}
ROWS = (1, 4)
# The loops that are counted: of floats with products of matrices on ARM; of the fast precision those that its tables have.
OF_ARM = {"neon_dotprod": set(LOOPS), "neon_i8mm": set(LOOPS) - {"bfloat16"}, "neon_bf16": {"bfloat16"}}
OF_CODES = set(LOOPS) - {"bfloat16"}
FAST = {"neon_dotprod": OF_CODES, "neon_i8mm": set(), "neon_bf16": set(), "avx2": OF_CODES - {"int8"}, "avx512": OF_CODES - {"int8"}}
UNITS = {"V": "vectors", "L": "loads"}  # by the letter that LLVM's models of ARM give them
TURNS = 200
BRANCH = re.compile(r"\t(?:b\.?\w*|cbn?z|tbn?z|j\w+)\t(?:.*, )?(\.L\w+)$")
PRODUCT = re.compile(r"\t(?:\{\w+\} )?(sdot|usmmla|fmla|bfmmla|vpdpbusd|vpdpwssd|vpmaddwd|vpmaddubsw)\t")
# Units of work of an instruction, in which a turn of a loop is counted.
PRODUCTS_OF = {"sdot": 8, "usmmla": 16, "fmla": 4, "bfmmla": 16, "vpdpbusd": 64, "vpdpwssd": 32, "vpmaddwd": 32, "vpmaddubsw": 64}


def source(tier, fast):
    """C with one function for each loop, of a tier's own headers."""
    isa, switches, target, _ = TIERS[tier]
    headers = re.findall(r'#include "(vectors/\w+\.inc\.h|coding/\w+\.inc\.h)"', (SIMD / "tier.inc.h").read_text("utf-8"))
    headers = headers[: headers.index("vectors/floating.inc.h") + 1]
    lines = [f"#define KV_FAST {fast:d}", '#include "common.h"', '#include "precision.h"', f'#pragma GCC target("{target}")']
    lines += ["#define KV(name) name##_loops", "#define kv_prefetch_level 1"]
    lines += [f"#define {switch}" for switch in switches]
    lines += [f'#include "{header}"' for header in (f"isa/{isa}", *headers)]
    parameters = (
        "const kv_side *side, const kv_queries *queries, const kv_ahead *streams, const kv_key_order *order, const char *base, "
        "ptrdiff_t tile_bytes, int lines, const int8_t *x, const char *ahead, vi out[KV_QUAD][4]"
    )
    for name in counted_loops(tier, fast):
        for rows in ROWS:
            call = LOOPS[name].format(rows=rows)
            lines.append(f"void {function(name, rows)}({parameters}) {{ const ptrdiff_t block = 0; (void)block; {call} }}")
    return "\n".join(lines) + "\n"


def counted_loops(tier, fast):
    """The loops of a tier, in their order."""
    return [name for name in LOOPS if name in (FAST.get(tier, OF_CODES) if fast else OF_ARM.get(tier, OF_CODES))]


def function(name, rows):
    return f"loop_{re.sub('[^a-z0-9]', '_', name)}_{rows}"


def turns_of(tier, fast, name, rows, loop):
    """How often a loop turns for a tile."""
    isa, switches = TIERS[tier][:2]
    products = [PRODUCTS_OF[found[1]] for found in map(PRODUCT.match, loop) if found]
    if name == "bfloat16":  # a product of matrices has two rows
        return HEAD_DIM * TOKENS * rows // (sum(products) // (2 if rows == 1 and "KV_BF16" in switches else 1))
    text = (SIMD / "isa" / isa).read_text("utf-8")
    width, vectors = (int(re.search(rf"#define {name} (\d+)", text)[1]) for name in ("W", "INT_VECTORS"))
    one_sum = tier == "avx_vnni" or (fast and tier == "neon_dotprod")  # see lines.inc.h
    two = tier == "neon_i8mm" or (one_sum and rows == 1)  # lines of int8 that a turn takes
    depths = {"int8": 8 if two else 4, "int4": 16}.get(name, 8)
    return TOKENS // (width * vectors) * (HEAD_DIM // depths)


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
    on_arm = core in TIERS["neon_dotprod"][3]
    command = [mca, f"-mcpu={core}", f"-iterations={TURNS}", "--json"]
    command += ["-mtriple=aarch64", "-mattr=+dotprod,+i8mm,+bf16"] if on_arm else ["-mtriple=x86_64"]
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


def loops(compilers):
    """By tier, precision, keys and query rows the instructions of each loop."""
    found = {}
    for tier, (isa, *_) in TIERS.items():
        for fast in (False, True):
            compiler = compilers[isa == "vec_neon.h"]
            done = subprocess.run([compiler, *FLAGS], input=source(tier, fast), capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{compiler} could not compile the loops of {tier}:\n{done.stderr[-2000:]}")
            for name in counted_loops(tier, fast):
                for rows in ROWS:
                    found[tier, fast, name, rows] = loop_of(done.stdout, function(name, rows))
    return found


def results(mca, compilers):
    found, counted = loops(compilers), []
    for name, rows, core, tier, fast in itertools.product(LOOPS, ROWS, CORES, TIERS, (False, True)):
        loop = found.get((tier, fast, name, rows))
        if loop and core in TIERS[tier][3]:
            products, turns = len([line for line in loop if PRODUCT.match(line)]), turns_of(tier, fast, name, rows, loop)
            cycles, bound = count(mca, core, loop)
            one = {"keys": name, "rows": rows, "core": CORES[core], "tier": tier, "precision": "fast" if fast else "exact"}
            one |= {"instructions": len(loop), "products": products, "turns": turns, "cycles": round(cycles * turns), "bound": bound}
            counted.append(one)
    return counted


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the counts as JSON")
    parser.add_argument("--mca", default="llvm-mca-19", help="the program (default: llvm-mca-19)")
    parser.add_argument("--compiler", default="aarch64-linux-gnu-gcc", help="GCC for 64-bit ARM (default: aarch64-linux-gnu-gcc)")
    parser.add_argument("--x86-compiler", default="gcc", help="GCC for x86-64 (default: gcc)")
    args = parser.parse_args()
    for program in (args.mca, args.compiler, args.x86_compiler):
        if shutil.which(program) is None:
            raise SystemExit(f"{program} is not installed; Debian has it in llvm-19 or gcc-aarch64-linux-gnu")
    rows = results(args.mca, (args.x86_compiler, args.compiler))
    for one in rows:
        print(*one.values(), sep="\t")
    if args.json:
        sys.path.insert(0, str(ROOT))
        from kvfast.tools.cli.bench.json_file import write_json

        versions = [
            re.search(pattern, subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout)[1]
            for program, pattern in ((args.mca, r"LLVM version ([\d.]+)"), (args.compiler, r"\) ([\d.]+)"))
        ]
        about = {"llvm": versions[0], "gcc": versions[1], "head_dim": HEAD_DIM, "tokens": TOKENS}
        write_json(args.json, about | {"results": rows})


if __name__ == "__main__":
    main()
