"""Prove that one build runs on any x86-64, or ARMv8.0: no newer instruction stands outside the functions of a tier that has it.

    python ci/audit_instructions.py [FILE.so | FILE.whl | DIRECTORY]...     (default: the kvfast that Python imports)

Disassembles with objdump. What an instruction needs is told by its bytes where a prefix or an opcode map tells it
(VEX, EVEX, and the maps 0F 38 and 0F 3A, where nothing is as old as SSE2), and by its name for the few others, and for ARM. Which
tier a function belongs to is told by the suffix of its symbol, which stays on the clones that the compiler makes of it.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import arm_instructions as arm

# What each tier may use beyond SSE2: the target regions of simd/tiers/. VEX is AVX, AVX2, FMA and F16C.
TIERS = {
    "scalar": set(),
    "sse2": set(),
    "avx2": {"vex"},
    "avx_vnni": {"vex", "vnni"},
    "avx512": {"popcnt", "vex", "evex"},
    "avx512_vnni": {"popcnt", "vex", "evex", "vnni"},
    "avx512_vbmi": {"popcnt", "vex", "evex", "vnni", "vbmi"},
    "amx": {"popcnt", "vex", "evex", "vnni", "vbmi", "amx"},
    "neon": set(),
    "neon_dotprod": {"dotprod"},
    "neon_i8mm": {"i8mm"},
    "neon_bf16": {"i8mm", "bf16"},
}
# Ask the processor what it has, and the operating system through XCR0, which is there when CPUID says so.
ASKS = re.compile(r"(__cpu_indicator_init|get_available_features|kv_cpu_features|kv_supported)(\..*)?")
MAY_ASK = {"xgetbv"}

LEGACY_PREFIXES = {0x26, 0x2E, 0x36, 0x3E, 0x64, 0x65, 0x66, 0x67, 0xF0, 0xF2, 0xF3}
# Above the baseline, in the opcode maps of the baseline. `tzcnt` is not here: without BMI it is `rep bsf`, which counts
# the same for what is not 0, and compilers write it for any x86-64 so.
LATER = {
    name: need
    for need, names in {
        "sse3": "addsubpd addsubps haddpd haddps hsubpd hsubps lddqu movddup movshdup movsldup fisttp fisttps fisttpl fisttpll "
        "monitor mwait",
        "sse4a": "extrq insertq movntsd movntss",
        "popcnt": "popcnt popcntw popcntl popcntq",
        "lzcnt": "lzcnt lzcntw lzcntl lzcntq",
        "cmpxchg16b": "cmpxchg16b",
        "3dnow": "prefetchw prefetchwt1 femms",
        "xsave": "xgetbv xsetbv xsave xsave64 xsavec xsavec64 xsaveopt xsaveopt64 xrstor xrstor64 xsaves xrstors",
        "system": "rdrand rdseed rdfsbase rdgsbase wrfsbase wrgsbase rdtscp rdpid rdpkru wrpkru clflushopt clwb cldemote clzero "
        "xbegin xend xabort xtest serialize umonitor umwait tpause ptwrite incsspq rdsspq",
    }.items()
    for name in names.split()
}
VNNI = re.compile(r"vpdp(bu|ws)")
VBMI = re.compile(r"vperm(b|i2b|t2b)$|vpmultishiftqb|vpcompress[bw]|vpexpand[bw]|vpsh[lr]dv?[wdq]|vpopcnt[bw]|vpshufbitqmb")
BFLOAT16 = re.compile(r"vdpbf16ps|vcvtne2?ps2bf16")
OTHERS = re.compile(
    r"v(aes|pclmul|gf2p8|p2intersect|sm[34]|sha)|v\w+(ph|sh|bf16)$|vpopcnt[dq]|vp(madd52|conflict|lzcnt)|vexp2|vr(cp|sqrt)28"
    r"|v4f|vp4dp|vscatterpf|vgatherpf"
)
F16C = {"vcvtps2ph", "vcvtph2ps"}
LABEL = re.compile(r"^[0-9a-f]+ <(.*)>:$")
LINE = re.compile(r"^\s*[0-9a-f]+:\t((?:[0-9a-f]{2,8} )+)\s*(?:\t(.*))?$")
PREFIX_WORDS = re.compile(r"^(?:(?:rep[nz]*|repe|lock|bnd|notrack|data16|addr32|[c-gs]s|rex\S*|\{\w+\})\s+)*")


def needs(code, name):
    """What an instruction needs beyond the baseline, or None."""
    at = 0
    while at < len(code) - 1 and code[at] in LEGACY_PREFIXES:
        at += 1
    if 0x40 <= code[at] <= 0x4F and at < len(code) - 1:
        at += 1
    first = code[at]
    if first in (0xC4, 0xC5, 0x62):  # in 64-bit code nothing else begins so
        return vector_needs(name, first)
    if first == 0xD5:
        return "apx"
    if first == 0x8F and code[at + 1] & 0x38:
        return "xop"
    if first == 0x0F and len(code) > at + 1 and code[at + 1] in (0x38, 0x3A):
        return "map 0F 38 or 0F 3A"
    if first == 0x0F and len(code) > at + 1 and code[at + 1] == 0x0F:
        return "3dnow"
    return LATER.get(name)


def vector_needs(name, first):
    if name.startswith(("tile", "tdp", "ldtilecfg", "sttilecfg")):
        return "amx"
    if VNNI.match(name):
        return "vnni"
    if VBMI.match(name):
        return "vbmi"
    if BFLOAT16.match(name):
        return "bfloat16"
    if OTHERS.match(name) and name not in F16C:
        return name
    if name.startswith("k") or first == 0x62:  # the mask registers of AVX-512 are coded with VEX
        return "evex"
    return "vex"


def package():
    """The folder of the sources, or of the kvfast that is installed: both have the headers."""
    sources = Path(__file__).parents[1] / "kvfast"
    if sources.is_dir():
        return sources
    import kvfast

    return Path(kvfast.__file__).parent


# Folders of simd/ whose functions may use more than their tier in the exact precision, and the name for what they may use: a region of
# tier.inc.h includes them. Files of the fast precision have a region of their own.
REGIONS = {"panels/tiles8": "amx", "panels/tiles_bf16": "amx"}


def functions_of_regions():
    """For each function that is defined in such a region what it may use; it has the suffix of the tier around it. Those that a macro
    ends with the name of a dtype end with an underscore."""
    found = {}
    for folder, tier in REGIONS.items():
        names = set()
        for header in (package() / "simd" / folder).glob("*.h"):
            source = header.read_text()
            names.update(
                re.findall(r"^static\b.*?\bKV\((\w+)\)\s*\(", source, re.MULTILINE),
                re.findall(r"\bstatic void KV\((\w+)##\w+\)", source),
            )
        if not names:
            raise SystemExit(f"no function found in simd/{folder}")
        found |= dict.fromkeys(names, tier)
    return found


def tier_of(symbol, regions):
    """Tier of a function by its symbol, or None."""
    whole = symbol.split("@")[0].split(".")[0]
    base = whole.removesuffix("_fast")  # a precision of the tier
    regions = regions if base == whole else {}
    for tier in sorted(TIERS, key=len, reverse=True):
        if base.endswith(f"_{tier}"):
            name = base.removesuffix(f"_{tier}")
            return next((of for one, of in regions.items() if name == one or one.endswith("_") and name.startswith(one)), tier)
    return None


def audit(path, regions):
    """(counts of instructions by tier and need, list of violations) of a shared object."""
    with open(path, "rb") as file:
        is_arm = file.read(20)[18:] == arm.MACHINE
    objdump = (is_arm and shutil.which("aarch64-linux-gnu-objdump")) or "objdump"
    text = subprocess.run([objdump, "-d", "-w", str(path)], capture_output=True, text=True, check=True).stdout
    counts, wrong, symbol, tier = Counter(), [], "", None
    for line in text.splitlines():
        if label := LABEL.match(line):
            symbol = label[1]
            tier = tier_of(symbol, regions)
            continue
        found = LINE.match(line)
        if not found or not found[2]:
            continue
        words = PREFIX_WORDS.sub("", found[2]).split()
        name = words[0] if words else ""
        if is_arm:
            need, may = arm.needs(found[2]), arm.ASKS.fullmatch(symbol)
        else:
            need, may = needs(bytes.fromhex(found[1]), name), ASKS.fullmatch(symbol) and name in MAY_ASK
        counts[tier, need] += 1
        if name == "(bad)" or need and need not in TIERS.get(tier, ()) and not may:
            wrong.append(f"{path.name}: {symbol}: {found[2].strip()} needs {need}")
    if not counts:
        raise SystemExit(f"{path}: objdump shows no instruction")
    return counts, wrong


def shared_objects(arguments, folder):
    """The shared objects that the arguments name, those of a wheel unpacked into a folder."""
    for argument in map(Path, arguments):
        if argument.suffix == ".whl":
            with zipfile.ZipFile(argument) as wheel:
                inside = [name for name in wheel.namelist() if name.startswith("kvfast/") and name.endswith(".so")]
                wheel.extractall(folder, inside)
            yield from (Path(folder, name) for name in inside)
        elif argument.is_dir():
            yield from sorted(argument.rglob("*.so"))
        else:
            yield argument


def main(arguments):
    if not arguments:
        import kvfast

        arguments = [Path(kvfast.__file__).parent]
    regions, total, wrong, files = functions_of_regions(), Counter(), [], 0
    with tempfile.TemporaryDirectory() as folder:
        for path in shared_objects(arguments, folder):
            counts, violations = audit(path, regions)
            total += counts
            wrong += violations
            files += 1
    if not files:
        raise SystemExit(f"no shared object in {', '.join(map(str, arguments))}")
    for tier in [None, *TIERS]:
        parts = {need or "baseline": n for (of, need), n in sorted(total.items(), key=str) if of == tier}
        if parts:
            print(f"{tier or 'every CPU':12}", ", ".join(f"{n:,} {need}" for need, n in parts.items()))
    print(f"{files} files, {sum(total.values()):,} instructions, {len(wrong)} outside their tier")
    print(*wrong[:40], sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
