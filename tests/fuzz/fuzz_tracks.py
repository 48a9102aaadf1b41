"""The rows that a cache was given, and what follows of them: what `fuzz_caches` compares its answers with."""

import numpy as np
from fuzz_oracle import NEVER, Finding, Side, coded_at, open_tokens, released_at


class Track:
    """What one sequence was given, and what follows of its rows from what was done to it."""

    def __init__(self, formats, heads, dims, block_size):
        self.formats, self.block_size = formats, block_size
        self.sides = [[Side(one, False), Side(one, True)] for one in formats]
        self.rows = [[np.empty((0, heads, dim), np.float32) for dim in dims] for _ in formats]
        self.length = self.longest = 0  # complete tokens; the most that there were
        self.coded = [0] * len(formats)  # tokens that are read from their codes alone
        self.lost = [NEVER] * len(formats)  # begin of the first block whose codes may be those of other floats than were given
        self.largest = 0  # the most tokens that were not complete
        self.lossy = [0] * len(formats)  # tokens whose floats have been given back once: what they are is what their codes are
        self.spans = [{} for _ in formats]  # by block: the least and largest key of each channel that was ever in it
        self.seen = [[None, None] for _ in formats]  # rows as they were first decoded, where they must stay so

    def copy(self):
        other = object.__new__(Track)
        other.__dict__.update(self.__dict__)
        other.rows, other.seen = [list(one) for one in self.rows], [list(one) for one in self.seen]
        other.spans, other.coded, other.lossy = [dict(one) for one in self.spans], list(self.coded), list(self.lossy)
        other.lost = list(self.lost)
        return other

    def layer_length(self, layer):
        return len(self.rows[layer][0])

    def append(self, layer, k, v):
        first = self.layer_length(layer)
        self.rows[layer] = [np.concatenate(pair) for pair in zip(self.rows[layer], (k, v))]
        if self.formats[layer].seals:
            rows = self.sides[layer][0].turned(k.astype(np.float64))
            for block in range(first // self.block_size, (first + len(k) - 1) // self.block_size + 1):
                part = rows[max(block * self.block_size - first, 0) : (block + 1) * self.block_size - first]
                low, high = part.min(0), part.max(0)
                if block in self.spans[layer]:
                    low, high = np.minimum(low, self.spans[layer][block][0]), np.maximum(high, self.spans[layer][block][1])
                self.spans[layer][block] = low, high
            self.coded[layer] -= self.coded[layer] % self.block_size
        self.largest = max(self.largest, self.layer_length(layer) - self.length)

    def advance(self, n):
        self.length += n
        self.longest = max(self.longest, self.length)
        self.coded = [max(pair) for pair in zip(self.coded, self.coded_at(self.length))]
        self.settle(0)

    def settle(self, n):
        """The first `n` tokens have their codes alone."""
        self.coded = [max(one, n) for one in self.coded]
        self.lossy = [max(pair) for pair in zip(self.lossy, self.coded)]

    def coded_at(self, length):
        """Tokens of each layer that no query reads as floats once there are `length`."""
        return [int(released_at(one, length, self.block_size)) if open_tokens(one) else 0 for one in self.formats]

    def read_from(self, layer, position):
        """First token that queries at a position, or after the tokens that are counted, read as a float."""
        form = self.formats[layer]
        if not open_tokens(form):
            return self.coded[layer]
        position = np.maximum(position, self.length)
        if not form.recent_by_query:  # queries read all tokens of their step as floats
            position = np.minimum(position, self.length + open_tokens(form))
        return np.maximum(self.coded[layer], coded_at(form, position, self.block_size))

    def is_fresh(self):
        """Whether a fresh cache has the same codes and floats: no block was written again after its floats were gone."""
        for form, coded, natural, lost in zip(self.formats, self.coded, self.coded_at(self.length), self.lost):
            if open_tokens(form) and (coded != natural or lost < NEVER):
                return False
        return True

    def truncate(self, n):
        for layer, coded in enumerate(self.coded):
            begin = n // self.block_size * self.block_size
            lost = self.lost[layer] if n > self.lost[layer] else NEVER
            self.lost[layer] = min(lost, begin) if self.formats[layer].seals and begin < n < coded else lost
        self.length, self.coded, self.lossy = n, [min(one, n) for one in self.coded], [min(one, n) for one in self.lossy]
        if n == 0:
            self.longest = 0
            self.spans = [{} for _ in self.formats]
        self.rows = [[side[:n] for side in pair] for pair in self.rows]
        self.seen = [[one if one is None else one[:n] for one in pair] for pair in self.seen]

    def keep(self, n, branch):
        """Keep the first `n` tokens, which are all that are complete, and those of the others that `branch` numbers."""
        for layer, (k, v) in enumerate(self.rows):
            for side, one in enumerate(self.seen[layer]):
                if one is not None and len(one) > n:
                    rest = branch[branch < len(one) - n]  # rows that were not looked at have no place yet
                    self.seen[layer][side] = np.concatenate([one[:n], one[n:][rest]])
            self.rows[layer] = [k[:n], v[:n]]
            if len(branch):
                self.append(layer, k[n:][branch], v[n:][branch])

    def spans_of(self, layer, positions):
        """The range of each channel over the block of each position, (tokens, heads, dim); 0 where there are no blocks."""
        if not self.formats[layer].seals or not len(positions):
            return np.zeros(1)
        blocks, inverse = np.unique(positions // self.block_size, return_inverse=True)
        return np.stack([self.spans[layer][int(one)][1] - self.spans[layer][int(one)][0] for one in blocks])[inverse]

    def check(self, layer, values, got, positions, where):
        """Hold rows of a layer to what was given, and to what they were."""
        side = self.sides[layer][values]
        given = self.rows[layer][values][positions]
        spans = self.spans_of(layer, positions) if side.per_channel or side.centred else np.zeros(1)
        gaps = np.flatnonzero(np.diff(positions) > 1)  # sink tokens have codes alone once blocks after them are gone
        lossy = max(self.lossy[layer], self.read_from(layer, self.layer_length(layer) - 1))
        lossy = max(lossy, positions[gaps[-1] + 1]) if len(gaps) else lossy
        told = f"{'values' if values else 'keys'} of {where}"
        side.check(got, given, positions, spans, lossy, told, self.lossy[layer] if side.newest and len(gaps) else NEVER)
        self._check_seen(layer, values, got, positions, where)

    def reach(self, layer, values, positions):
        """How far rows may be from what was given: (tokens, heads)."""
        side = self.sides[layer][values]
        spans = self.spans_of(layer, positions) if side.per_channel or side.centred else np.zeros(1)
        return side.reach(self.rows[layer][values][positions], spans)

    def _check_seen(self, layer, values, got, positions, where):
        if not got.size:
            return
        side, seen = self.sides[layer][values], self.seen[layer][values]
        length = self.layer_length(layer)
        if seen is None:
            seen = np.full((0, *got.shape[1:]), np.nan, np.float32)
        if len(seen) < length:
            seen = np.concatenate([seen, np.full((length - len(seen), *got.shape[1:]), np.nan, np.float32)])
        before = seen[positions]
        known = ~np.isnan(before[:, 0, 0])
        if known.any():
            moved, at_positions = np.abs(got[known] - before[known]), positions[known]
            # Where blocks are sealed, tokens that are written to again are float16 rows of their codes meanwhile.
            most = 2.0**-9 * np.linalg.norm(before[known], axis=-1, keepdims=True) + 2.0**-20 if side.seals else 0.0
            has_moved = (moved > most).any((1, 2))
            if side.seals:  # a patched block shows float rows of tokens without codes, which get codes once tokens follow that fit
                was_float = (np.abs(before[known] - self.rows[layer][values][positions[known]]) <= most).all((1, 2))
                known[known] = ~(has_moved & was_float)
                has_moved &= ~was_float
            if has_moved.any():
                at = int(np.argmax(has_moved))
                raise Finding(
                    f"kept tokens changed | {'values' if values else 'keys'} of {where}",
                    f"token {at_positions[at]} by {moved[at].max():.3g}",
                )
        # The blocks of a found prefix may have their floats yet, of the sequence that they come from.
        stays = positions < (min(self.coded[layer], self.coded_at(self.longest)[layer]) if side.newest else length)
        new = stays & ~known
        if new.any():
            self.seen[layer][values] = seen = seen.copy()  # which a copy of this may have, too
            seen[positions[new]] = got[new]
