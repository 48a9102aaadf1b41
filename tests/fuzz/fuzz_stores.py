"""Stores of prompts for `fuzz_caches`: what is found, and by whom."""

import contextlib

import numpy as np
from dict_store import DictStore
from fuzz_inputs import often, one_of, random_formats
from fuzz_oracle import Finding
from fuzz_refusals import bits

import kvfast

SALTS = [b"", b"alice", b"alice\0", b"bob"]
MOST_TENANTS = 4


def longer_prompt(world, held, rng):
    """A prompt that was saved is found whole by every prompt that continues it."""
    cache, length = held.cache, held.track.length
    ids, found = np.arange(length), []
    world.case.calls += 3
    with kvfast.PromptCache(DictStore(), chunk_tokens=max(64, cache.block_size)) as prompts:
        prompts.save(cache, ids)
        prompts.flush()
        for more in (1, int(one_of(rng, [2, 60, 80, 129, 300, 700]))):
            new = kvfast.load(cache.snapshot().truncated(0))
            found.append((prompts.restore(new, [*ids, *range(length, length + more)]), new))
    world.case.note("longer prompt", length, more, [one for one, _ in found])
    if found[0][0] != length:
        raise Finding("a saved prompt is not found", f"{found[0][0]} of {length} tokens")
    if found[1][0] != length:
        raise Finding("a saved prompt is not found for a longer one", f"{found[1][0]} of {length} tokens, {more} after them")
    for layer in range(cache.num_layers):
        with contextlib.suppress(kvfast.NonFiniteInputError):
            one, other = (world.decoded(new, layer) for _, new in found)
            if [bits(side) for side in one] != [bits(side) for side in other]:
                raise Finding("a saved prompt has other rows for a longer one")


class Text:
    """A sequence of a tenant, and the ids that it told. One that was restored has no salt of its own: once all of its tokens are taken
    back, it is nobody's."""

    def __init__(self, sequence, salt, ids, told, own_salt=None):
        self.sequence, self.salt, self.ids, self.told = sequence, salt, ids, told
        self.own_salt = salt if own_salt is None else own_salt


class TenantsWorld:
    """Tenants with texts in common, in pools before one store: nobody finds what only others have written."""

    def __init__(self, case):
        self.case, self.rng = case, case.rng
        rng = self.rng
        self.heads, self.dim = int(one_of(rng, [1, 2])), int(one_of(rng, [8, 16, 33]))
        self.formats = random_formats(rng, int(one_of(rng, [1, 1, 2])))
        self.settings = {"num_blocks": int(one_of(rng, [20, 60, 200]))}
        if often(rng, 0.2):
            self.settings |= {"sliding_window": int(one_of(rng, [100, 300])), "rollback": 64}
        self.store, self.prompts = DictStore(), None
        self.documents = [rng.integers(1 << 40, size=int(rng.integers(100, 400))) for _ in range(2)]
        self.documents.append(np.concatenate([self.documents[0][: int(rng.integers(60, 100))], self.documents[1]]))
        self.written = {salt: [] for salt in SALTS}  # the ids of all texts of a tenant
        self.texts, self.snapshots = [], []
        case.note("tenants", [repr(one) for one in self.formats], self.settings)
        self.restart()

    def restart(self):
        """Another server: a new pool, perhaps of blocks of another size, before the same store."""
        rng, size = self.rng, None
        self.texts, self.snapshots = [], []
        if not any(one.seals for one in self.formats):
            size = one_of(rng, [None, 16, 32, 64, 128])
        self.pool = kvfast.PagedKVCache(len(self.formats), self.heads, self.dim, dtype=self.formats, block_size=size, **self.settings)
        self.case.note("pool", self.pool.block_size)
        if self.prompts is not None:
            self.prompts.close()
        self.prompts = kvfast.PromptCache(self.store, chunk_tokens=max(64, *(one.block_size or 0 for one in self.formats)))
        if often(rng, 0.85):
            self.pool.use_prompt_cache(self.prompts, "model")

    def run(self):
        rng = self.rng
        for _ in range(int(rng.integers(5, 40))):
            way = rng.random()
            if way < 0.4 or not self.texts:
                self.begin()
            elif way < 0.5:
                self.restart()
            else:
                text = one_of(rng, self.texts)
                change = one_of(rng, [self.go_on, self.go_on, self.fork, self.free, self.free, self.back, self.snapshot, self.restore])
                with contextlib.suppress(kvfast.CacheFullError):
                    change(text)
            while len(self.texts) > MOST_TENANTS:
                self.free(self.texts[0])
        self.prompts.close()

    def begin(self):
        rng, salt = self.rng, one_of(self.rng, SALTS)
        document = one_of(rng, self.documents)
        ids = document[: int(rng.integers(2, len(document) + 1))]
        self.case.calls += 1
        try:
            sequence = self.pool.match_prefix(ids, salt)
        except kvfast.CacheFullError:
            return
        found, known = len(sequence), max((common(ids, one) for one in self.written[salt]), default=0)
        self.case.note("match_prefix", salt, len(ids), found, known)
        if found > known:
            raise Finding("tokens are found that the tenant never wrote", f"{found} for {salt}, who wrote {known}")
        if found and not self.settings.get("sliding_window") and self.formats[0].k_dtype not in ("int2", "int3"):
            mean = float(np.mean(sequence.k(0)[:found]))
            if not 0.25 < mean / number_of(salt) < 4:
                raise Finding("a prefix of another tenant", f"{mean:.3g} for {number_of(salt)}")
        text = Text(sequence, salt, document, True)
        self.texts.append(text)
        with contextlib.suppress(kvfast.CacheFullError):
            self.go_on(text, len(ids) - found)

    def go_on(self, text, n=None):
        rng, first = self.rng, len(text.sequence)
        n = min(int(rng.integers(1, 150)) if n is None else n, len(text.ids) - first)
        if n <= 0 or not text.sequence.can_append(n):
            return
        rows = number_of(text.salt) * rng.uniform(0.99, 1.01, (n, self.heads, self.dim)).astype(np.float32)
        for layer in range(len(self.formats)):
            text.sequence.append(layer, rows, rows)
        tells = often(rng, 0.9)
        text.told = text.told and tells
        self.case.note("go on", text.salt, first, n, tells)
        text.sequence.advance(n, text.ids[first : first + n] if tells else None)
        self.written[text.salt].append(text.ids[: first + n])

    def fork(self, text):
        self.case.note("fork", text.salt)
        self.texts.append(Text(text.sequence.fork(), text.salt, text.ids, text.told, text.own_salt))

    def free(self, text):
        self.case.note("free", text.salt, len(text.sequence))
        text.sequence.free()
        self.texts.remove(text)

    def back(self, text):
        length = len(text.sequence)
        n = int(self.rng.integers(max(length - 60, 0), length + 1)) if often(self.rng, 0.7) else 0
        self.case.note("truncate", text.salt, n)
        with contextlib.suppress(ValueError):  # a window cannot go back that far
            text.sequence.truncate(n)
            if n == 0:
                text.salt = text.own_salt

    def snapshot(self, text):
        self.case.note("snapshot", text.salt)
        self.snapshots = [*self.snapshots[-2:], (text.sequence.snapshot(), text)]

    def restore(self, _):
        if self.snapshots:
            snapshot, text = one_of(self.rng, self.snapshots)
            self.case.note("restore", text.salt, len(snapshot))
            salt = text.salt if len(snapshot) else b""
            self.texts.append(Text(self.pool.restore(snapshot), salt, text.ids, text.told, b""))


def number_of(salt):
    """What all keys of a tenant are near to."""
    return 16.0 ** SALTS.index(salt)


def common(one, other):
    """How many first tokens two texts have in common."""
    n = min(len(one), len(other))
    different = np.flatnonzero(one[:n] != other[:n])
    return int(different[0]) if len(different) else n
