"""The table of storage dtypes and the limits: what C, Python and the docs read is one thing, and true."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from kvfast.codec.dtypes import DTYPE_TABLE, NAMES

import kvfast
from kvfast import KVFormat
from kvfast.core import limits
from kvfast.planning.plan import DTYPES

SOURCES = Path(__file__).parents[2] / "kvfast"
DIM = 48


def cache_of(row, **options):
    """A cache whose keys and values are stored as a row of the table."""
    codebook = row.codebooks[0] if row.codebooks else "uniform"
    return kvfast.KVCache(1, 1, DIM, dtype=KVFormat(row.name, codebook=codebook, **options))


def limit_of(number):
    return next(row.limit for row in DTYPE_TABLE if row.number == number)


@pytest.fixture(params=DTYPE_TABLE, ids=lambda row: row.number)
def row(request):
    return request.param


def test_numbers_stay():
    """C programs pass those of the floats, and a new row comes last."""
    assert [row.number for row in DTYPE_TABLE[:12]] == [
        *("FLOAT32", "FLOAT16", "BFLOAT16", "INT8", "INT4", "GAUSS4", "INT2", "INT3", "INT5", "INT6", "INT7")
    ]


def test_a_token_takes_the_bytes_of_the_table(row):
    assert cache_of(row).bytes_per_token == 2 * (DIM * row.bits // 8 + row.scale_bytes)


def test_the_row_is_what_is_read(row):
    cache = cache_of(row)
    cache.append(0, *np.ones((2, 1, 1, DIM), np.float32))
    plan = cache.explain(0, 1)
    assert plan.kernels[:2] == (f"scores_{row.number.lower()}", f"accumulate_{row.number.lower()}")


def test_what_the_limit_allows_stays_finite(row, isa, rng):
    """Rows of the largest elements, alone among smaller ones too: a level that stands for more than the element overflows."""
    k = np.stack([np.where(np.arange(DIM) % 16 == 3, row.limit, share * row.limit) for share in np.linspace(0, 1, 65)])
    k = np.copysign(k, rng.standard_normal(k.shape)).astype(np.float32)[:, None]
    for options in ({}, {"clip_search": True}) if "clip_search" in row.options else ({},):
        for codebook in row.codebooks or ("uniform",):
            cache = kvfast.KVCache(1, 1, DIM, dtype=KVFormat(row.name, codebook=codebook, **options))
            cache.append(0, k, -k)
            assert np.isfinite(cache.k(0)).all() and np.isfinite(cache.v(0)).all()


def test_nothing_beyond_the_limit_is_stored(row):
    if row.number in ("FLOAT32", "INT4"):
        pytest.skip("the limit is that of float32")
    k = np.zeros((1, 1, DIM), np.float32)
    k[0, 0, 5] = np.nextafter(np.float32(row.limit), np.float32(np.inf))
    with pytest.raises(kvfast.NonFiniteInputError, match=re.escape(f"(+-{row.limit:g})")):
        cache_of(row).append(0, k, k)


def test_levels(row, rng):
    """A row of 512 elements holds as many values as the table says, nearly all of them."""
    if not row.levels:
        pytest.skip("a float")
    cache = kvfast.KVCache(1, 1, limits.MAX_HEAD_DIM, dtype=KVFormat(row.name, codebook=row.codebooks[-1]))
    k = rng.uniform(-1, 1, (20, 1, limits.MAX_HEAD_DIM)).astype(np.float32)
    cache.append(0, k, k)
    assert 0.6 * row.levels <= max(np.unique(one).size for one in cache.k(0)) <= row.levels


def test_names(row):
    for name in (row.name, *row.also):
        assert KVFormat(name).dtype == KVFormat(name.upper()).dtype == row.name
    assert row.name in NAMES and row.name in {*DTYPES}
    assert row.bits in (int(row.name.lstrip("bfloatin")), 32)


@pytest.mark.parametrize("option", ["centring", "per_channel", "clip_search"])
def test_options_are_those_of_the_table(row, option):
    if option in row.options:
        assert getattr(KVFormat(row.name, codebook=row.codebooks[0], **{option: True}), option) is True
        return
    if option == "per_channel" and row.name == "int4":
        pytest.skip("keys are then evenly spaced, whatever the codebook of the values is")
    with pytest.raises(ValueError, match=f"{option} is for"):
        cache_of(row, **{option: True})


def test_codebooks_are_those_of_the_table():
    for name in NAMES:
        known = {codebook for row in DTYPE_TABLE if row.name == name for codebook in row.codebooks}
        if "gaussian" in known:
            assert KVFormat(name, codebook="gaussian").codebook == "gaussian"
        else:
            with pytest.raises(ValueError, match="which neither side of this format has"):
                KVFormat(name, codebook="gaussian")


def test_limits_are_those_of_floats():
    assert limits.MAX_FLOAT16 == np.finfo(np.float16).max
    assert limit_of("FLOAT32") == np.finfo(np.float32).max
    assert limit_of("BFLOAT16") == math.ldexp(255, 120)
    assert np.float32(limits.MAX_ROTATED) * np.float32(limits.MAX_HEAD_DIM) < np.inf


def test_block_sizes():
    for size in range(1, 300):
        if size in limits.BLOCK_SIZES:
            assert kvfast.KVCache(1, 1, 16, dtype="int8", block_size=size).block_size == size
        else:
            with pytest.raises(ValueError, match="block_size must be"):
                kvfast.KVCache(1, 1, 16, dtype="int8", block_size=size)


# What stands in limits.h and dtypes.h alone. A docstring may name it.
ONCE = r"65504|3\.40282|6e35|1\.6e38|3\.3e38|1 << 40|1 << 60|\[512\]|, 1, 512\)|\b_INTEGERS|\b(?:PIECE|OPEN_TOKENS|FEW_QUERIES) ="


def test_no_source_repeats_a_limit():
    if not (SOURCES / "core" / "limits.pyx").exists():
        pytest.skip("the sources are not here")
    found = []
    for path in SOURCES.rglob("*"):
        if path.suffix in (".py", ".pyx", ".pxd", ".h") and path.name not in ("limits.h", "dtypes.h", "limits.pyx"):
            code = re.sub(r'""".*?"""|/\*.*?\*/|#[^\n]*(?=\n)', "", path.read_text("utf-8"), flags=re.DOTALL)
            found += [f"{path.relative_to(SOURCES)}: {match[0]}" for match in re.finditer(ONCE, code)]
    assert found == []
