"""Lower the heaviest part of a partition by exchanging samples between pairs of parts.

A partition is a matrix ``members``: ``[k, m]``, int64, one row of sample indices per part, padded with the index N of a dummy sample of
weight 0. Exchanges swap equally many entries of two rows, so that row lengths never change; a dummy among them makes it a move.
"""

from functools import lru_cache
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_rlbatch.functional.workload import IntArray

BoolArray: TypeAlias = npt.NDArray[np.bool_]
KEY_LIMIT = 2**61


@lru_cache(maxsize=32)
def _subsets(width: int, size: int) -> IntArray:
    """Return all sets of ``size`` columns, ``[sets, size]``."""
    return np.array(list(combinations(range(width), size)), dtype=np.int64).reshape(-1, size)


class Exchange:
    """The best exchange of one size for many pairs of parts at once.

    For a pair with loads H >= L, swapping a for b leaves the difference ``|H - L - 2 (a - b)|``. One binary search over the sums of
    the lighter parts, with the pair's number as leading digit, finds for every a of every heavier part the b that comes closest to
    the wanted ``a - b``.

    Args:
        weights: ``[N + 1]``, int64; the last is the dummy's 0.
        members: ``[k, m]``, int64; changed in place.
        equal_size: A part must not receive a second dummy.
        num_rows: Parts come in so many rows of equal length; what counts is the heaviest part of every row.
        tokens: ``[N + 1]``, int64, a second weight; no exchange brings its sum in a part above ``budget``.
        budget: See ``tokens``.
    """

    def __init__(
        self,
        weights: IntArray,
        members: IntArray,
        equal_size: bool,
        *,
        num_rows: int = 1,
        tokens: IntArray | None = None,
        budget: int = 0,
    ) -> None:
        self.weights = weights
        self.tokens = tokens
        self.budget = budget
        self.equal_size = equal_size
        self.row_of = np.repeat(np.arange(num_rows), len(members) // num_rows)
        self.num_rows = num_rows
        self.dummy = len(weights) - 1
        self.reset(members)

    def reset(self, members: IntArray) -> None:
        """Replace the partition."""
        self.members = members
        self.load: IntArray = self.weights[members].sum(axis=1)
        self.held: IntArray | None = None if self.tokens is None else self.tokens[members].sum(axis=1)

    def row_maxima(self) -> IntArray:
        """Return the load of the heaviest part of every row."""
        result: IntArray = self.load.reshape(self.num_rows, -1).max(axis=1)
        return result

    def find(self, heavy: IntArray, light: IntArray, size: int, aim: IntArray, limit: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Find the best exchange of every pair.

        Args:
            heavy: ``[P]``, int64, parts that give the larger sum.
            light: ``[P]``, int64, parts that give the smaller sum.
            size: Entries that each side gives.
            aim: ``[P]``, int64, the weight to transfer.
            limit: ``[P]``, int64, the most that may be transferred; never all that a part holds.

        Returns:
            ``[P]`` each: the transferred weight a - b (0: nothing helps), and the column set of the heavy and of the light part.
        """
        sets = _subsets(self.members.shape[1], size)
        give, take = self._sums(self.weights, heavy, sets), self._sums(self.weights, light, sets)
        top = int(max(take.max(initial=0), give.max(initial=0))) + 2
        forbidden, forbidden_take = self._second_dummy(heavy, light, sets)
        take = np.where(forbidden_take, top, take)
        order = np.argsort(take, axis=1, kind="stable")
        ordered = np.take_along_axis(take, order, axis=1)
        right = _search(ordered, np.clip(give - aim[:, None], 0, top - 1), top)
        places = [right - 1, right]
        more = less = None
        if self.tokens is not None and self.held is not None:
            more, less = self._sums(self.tokens, heavy, sets), self._sums(self.tokens, light, sets)
            less = np.take_along_axis(less, order, axis=1)
            if size == 1:  # the lightest partner that frees enough tokens; exact where tokens grow with weight
                free = self.budget - self.held[light]
                places.append(_search(less, np.clip(more - free[:, None], 0, self.budget + 1), self.budget + 2))
        most = np.minimum(limit, self.load[heavy] - 1)[:, None]
        best: tuple[IntArray, ...] | None = None
        for place in places:
            position = np.clip(place, 0, len(sets) - 1)
            moved = give - np.take_along_axis(ordered, position, axis=1)
            bad = (moved <= 0) | (moved > most) | forbidden
            if more is not None and less is not None:
                bad |= self._over_budget(heavy, light, more - np.take_along_axis(less, position, axis=1))
            left_over = np.where(bad, KEY_LIMIT, np.abs(aim[:, None] - moved))
            choice = left_over.argmin(axis=1)[:, None]
            found = [np.take_along_axis(x, choice, axis=1)[:, 0] for x in (left_over, moved)]
            partner = np.take_along_axis(order, np.take_along_axis(position, choice, axis=1), axis=1)[:, 0]
            candidate = (found[0], found[1], choice[:, 0], partner)
            best = candidate if best is None else tuple(np.where(candidate[0] < best[0], c, b) for c, b in zip(candidate, best))
        assert best is not None
        return np.where(best[0] < KEY_LIMIT, best[1], 0), best[2], best[3]

    def apply(self, heavy: IntArray, light: IntArray, give: IntArray, take: IntArray, size: int) -> None:
        """Swap the chosen column sets of disjoint pairs."""
        sets = _subsets(self.members.shape[1], size)
        rows_h, rows_l, columns_h, columns_l = heavy[:, None], light[:, None], sets[give], sets[take]
        kept = self.members[rows_h, columns_h]
        self.members[rows_h, columns_h] = self.members[rows_l, columns_l]
        self.members[rows_l, columns_l] = kept
        changed = np.concatenate([heavy, light])
        self.load[changed] = self.weights[self.members[changed]].sum(axis=1)
        if self.tokens is not None and self.held is not None:
            self.held[changed] = self.tokens[self.members[changed]].sum(axis=1)

    def _sums(self, weights: IntArray, parts: IntArray, sets: IntArray) -> IntArray:
        entries = weights[self.members[parts]]
        total: IntArray = entries[:, sets[:, 0]]
        for column in range(1, sets.shape[1]):
            total = total + entries[:, sets[:, column]]
        return total

    def _over_budget(self, heavy: IntArray, light: IntArray, moved_tokens: IntArray) -> BoolArray:
        assert self.held is not None
        after_l = self.held[light][:, None] + moved_tokens
        after_h = self.held[heavy][:, None] - moved_tokens
        return np.asarray((after_l > self.budget) | (after_h > self.budget))

    def _second_dummy(self, heavy: IntArray, light: IntArray, sets: IntArray) -> tuple[BoolArray, BoolArray]:
        """Mark the sets, [P, sets], that would leave two dummies in one row where both rows have one."""
        none = np.zeros((1, 1), dtype=np.bool_)
        if not self.equal_size:
            return none, none
        dummy_h, dummy_l = (self.members[rows] == self.dummy for rows in (heavy, light))
        both = dummy_h.any(axis=1) & dummy_l.any(axis=1)
        if not both.any():
            return none, none
        return dummy_h[:, sets].any(axis=2) & both[:, None], dummy_l[:, sets].any(axis=2) & both[:, None]


def _search(ordered: IntArray, wanted: IntArray, top: int) -> IntArray:
    """Return where ``wanted`` would be inserted in its own line of ``ordered`` ([P, sets] each, values from 0 to ``top``)."""
    shift = max(0, (top * (len(ordered) + 1)).bit_length() - 61)  # a rounded key only costs precision of the choice
    line = np.arange(len(ordered), dtype=np.int64)[:, None]
    keys = line * ((top >> shift) + 1) + (ordered >> shift)
    found = np.searchsorted(keys.reshape(-1), (line * ((top >> shift) + 1) + (wanted >> shift)).reshape(-1))
    return np.asarray(found.reshape(wanted.shape) - line * ordered.shape[1])


def level(exchange: Exchange, target: IntArray, max_rounds: int) -> None:
    """Swap single entries between the i-th heaviest and the i-th lightest part of every row, where the heavy one is above its target.

    Args:
        exchange: The partition, changed in place.
        target: ``[k]``, int64, load of a part that is good enough.
        max_rounds: Rounds at most; a clock would give every rank another answer.
    """
    width = len(exchange.load) // exchange.num_rows
    half, shift = width // 2, 0
    first = np.arange(exchange.num_rows)[:, None] * width
    for _ in range(max_rounds):
        if shift >= half:
            return
        order = np.argsort(-exchange.load.reshape(-1, width), axis=1, kind="stable") + first
        heavy, light = order[:, :half], np.roll(order[:, ::-1][:, :half], -shift, axis=1)
        above = exchange.load[heavy] > target[heavy]
        if not above.any():
            return
        heavy, light = heavy[above], light[above]
        gap = exchange.load[heavy] - exchange.load[light]
        moved, give, take = exchange.find(heavy, light, 1, gap // 2, gap - 1)
        use = moved > 0
        if use.any():
            exchange.apply(heavy[use], light[use], give[use], take[use], 1)
        shift = 0 if use.all() else shift + 1


def settle(exchange: Exchange, target: IntArray, sizes: tuple[int, ...], max_rounds: int, max_pairs: int = 20_000) -> None:
    """Bring the parts above their target down to it, each by the exchange that costs the others least.

    Every round compares the parts most above their target with many partners. A part takes the smallest transfer that brings it to the
    target and keeps its partner where it does not count; without one, the exchange after which the heavier of the two is lightest.
    No row maximum ever grows. Larger exchanges are tried only when smaller ones no longer help.

    Args:
        exchange: The partition, changed in place.
        target: ``[k]``, int64, load of a part that is good enough.
        sizes: Entries that each side gives, tried in this order.
        max_rounds: Rounds at most.
        max_pairs: Column sets compared in one round at most.
    """
    stage = 0
    sizes = tuple(size for size in sizes if size <= exchange.members.shape[1])
    for _ in range(max_rounds):
        excess = exchange.load - target
        order = np.argsort(-excess, kind="stable")
        num_heavy = int((excess > 0).sum())
        if num_heavy == 0 or stage == len(sizes):
            return
        num_sets = len(_subsets(exchange.members.shape[1], sizes[stage]))
        room = np.where(excess > 0, -1, exchange.row_maxima()[exchange.row_of] - exchange.load)
        partners = np.argsort(-room, kind="stable")[: max(1, int((room >= 0).sum()))]
        partners = partners[: max(8, max_pairs // num_sets)]
        heavy = order[: max(1, min(num_heavy, max_pairs // (num_sets * len(partners))))]
        stage = 0 if _settle_round(exchange, target, heavy, partners, sizes[stage]) else stage + 1


def _settle_round(exchange: Exchange, target: IntArray, heavy: IntArray, partners: IntArray, size: int) -> bool:
    """Apply at most one exchange per heavy part and per partner; say whether there was any."""
    parts, others = np.repeat(heavy, len(partners)), np.tile(partners, len(heavy))
    load_h, load_p = exchange.load[parts], exchange.load[others]
    same = exchange.row_of[parts] == exchange.row_of[others]
    ceiling = np.where(same, target[others], exchange.row_maxima()[exchange.row_of[others]])  # up to here the partner costs nothing
    limit = np.where(same, load_h - 1, 0 if exchange.equal_size else ceiling) - load_p  # equal sizes are a matter of one row
    excess = load_h - target[parts]
    aim = excess + (np.maximum(ceiling - load_p, 0) - excess) // 8
    aim = np.maximum(np.minimum(aim, np.where(same, (load_h - load_p) // 2, limit)), 1)
    moved, give, take = exchange.find(parts, others, size, aim, limit)
    after_h, after_p = load_h - moved, load_p + moved
    reached = (after_h <= target[parts]) & (after_p <= ceiling)
    score = np.where(reached, moved - KEY_LIMIT, np.where(same, np.maximum(after_h, after_p), after_h) - exchange.load.min())
    score = np.where(moved > 0, score, KEY_LIMIT).reshape(len(heavy), len(partners))
    chosen: list[int] = []
    for i in range(len(heavy)):
        best = int(score[i].argmin())
        if score[i, best] < KEY_LIMIT:
            chosen.append(i * len(partners) + best)
            score[:, best] = KEY_LIMIT
    pick = np.array(chosen, dtype=np.int64)
    if chosen:
        exchange.apply(parts[pick], others[pick], give[pick], take[pick], size)
    return bool(chosen)
