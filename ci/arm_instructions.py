"""Instructions of 64-bit ARM that not every processor of ARMv8.0 has, told by the text of the disassembly."""

import re

MACHINE = b"\xb7\x00"  # in the header of an ELF file

# First what names that stand further down are also the names of.
_LATER = [
    (need, re.compile(pattern))
    for need, pattern in [
        ("sve", r".*\b(z\d+(\.|\b)|p\d+[./])|(rdvl|addvl|addpl|(cnt|inc|dec)[bhwd]|while\w+|smstart|smstop|rdsvl)\b"),
        ("i8mm", r"(usdot|sudot|u?smmla|ummla)\b"),
        ("bf16", r"bf(dot|mmla|mlal|cvt)"),
        ("dotprod", r"[us]dot\b"),
        ("lse", r"(casp?|swp|(ld|st)(add|clr|eor|set|[us]max|[us]min))(a|l|al)?[bh]?\b"),
        ("rdm", r"sqrdml[as]h\b"),
        ("fp16", r"([us]cvtf|f(?!cvt[ln]?2?\s)\w+)\s.*(\.[48]h|\bh\d+)\b"),
        ("crypto", r"(aes\w+|sha\d\w+|sm[34]\w+|eor3|rax1|xar|bcax)\b|pmull2?\s.*\.1q"),
        ("crc", r"crc32"),
        ("rcpc", r"(ldapu?r|stlur)"),
        ("pauth", r"(reta[ab]|blra[ab]z?|bra[ab]z?|eretaa|eretab|ldra[ab])\b"),
        ("later", r"(fjcvtzs|fcmla|fcadd|fml[as]l2?|frint(32|64)[xz]|cfinv|rmif|setf(8|16)|[ax]{2}flag|wf[ei]t|ld64b|st64b\w*)\b"),
        ("memory tags", r"(irg|st2?z?g|ldg)\b"),
        ("mops", r"(cpyf?|set)[pme]\w*\b"),
        ("cssc", r"(ctz|cnt|abs|[us]max|[us]min)\s+[wx]\d"),
        ("an instruction that objdump does not know", r"\.(inst|word)|udf\b"),
    ]
]

# Atomics of libgcc, which ask the processor for LSE.
ASKS = re.compile(r"__aarch64_(cas|swp|ld[a-z]+)\d+_\w+")


def needs(text):
    """What an instruction needs beyond the baseline, or None."""
    return next((need for need, pattern in _LATER if pattern.match(text)), None)
