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
PAIR_LIMIT = 20_000  # column sets compared in one round


@lru_cache(maxsize=32)
def _subsets(width: int, size: int) -> IntArray:
    """Return all sets of ``size`` columns, ``[sets, size]``."""
    return np.array(list(combinations(range(width), size)), dtype=np.int64).reshape(-1, size)


class Exchange:
    """The best exchange of one size for many pairs of rows at once.

    For a pair with loads H >= L, swapping a for b leaves the difference ``|H - L - 2 (a - b)|``. One binary search over the sums of
    the lighter rows, with the pair's number as leading digit, finds for every a of every heavier row the b that comes closest to
    ``a - (H - L) / 2``.

    Args:
        weights: ``[N + 1]``, int64; the last is the dummy's 0.
        members: ``[k, m]``, int64; changed in place.
        equal_size: A row must not receive a second dummy.
    """

    def __init__(self, weights: IntArray, members: IntArray, equal_size: bool) -> None:
        self.weights = weights
        self.members = members
        self.equal_size = equal_size
        self.load: IntArray = weights[members].sum(axis=1)
        self.dummy = len(weights) - 1

    def reset(self, members: IntArray) -> None:
        """Replace the partition."""
        self.members = members
        self.load = self.weights[members].sum(axis=1)

    def find(self, heavy: IntArray, light: IntArray, size: int, aim: IntArray | None = None) -> tuple[IntArray, IntArray, IntArray]:
        """Find the best exchange of every pair.

        Args:
            heavy: ``[P]``, int64, rows that give the larger sum.
            light: ``[P]``, int64, rows of at most their load.
            size: Entries that each side gives.
            aim: ``[P]``, int64, the weight to transfer; default half the difference of the loads.

        Returns:
            ``[P]`` each: the transferred weight a - b (0: nothing helps), and the column set of the heavy and of the light row.
        """
        sets = _subsets(self.members.shape[1], size)
        gap = self.load[heavy] - self.load[light]
        doubled = gap if aim is None else 2 * aim
        give, take = self._sums(heavy, sets), self._sums(light, sets)
        top = int(max(take.max(initial=0), give.max(initial=0))) + 2
        shift = max(0, (top * (len(heavy) + 1)).bit_length() - 61)  # a rounded key only costs precision of the choice
        base = (np.arange(len(heavy), dtype=np.int64) * ((top >> shift) + 1))[:, None]
        forbidden_give, forbidden_take = self._second_dummy(heavy, light, sets)
        take = np.where(forbidden_take, top, take)
        order = np.argsort(take, axis=1, kind="stable")
        keys = (base + (np.take_along_axis(take, order, axis=1) >> shift)).reshape(-1)
        wanted = np.clip(give - (doubled // 2)[:, None], 0, top - 1) >> shift
        right = np.searchsorted(keys, (base + wanted).reshape(-1)).reshape(give.shape)
        starts = (np.arange(len(heavy), dtype=np.int64) * len(sets))[:, None]
        best: tuple[IntArray, ...] | None = None
        for place in (right - 1, right):
            position = np.clip(place - starts, 0, len(sets) - 1)
            moved = give - np.take_along_axis(take, np.take_along_axis(order, position, axis=1), axis=1)
            left_over = np.where((moved <= 0) | (moved >= gap[:, None]), KEY_LIMIT, np.abs(doubled[:, None] - 2 * moved))
            left_over = np.where(forbidden_give, KEY_LIMIT, left_over)
            choice = left_over.argmin(axis=1)[:, None]
            found = [np.take_along_axis(x, choice, axis=1)[:, 0] for x in (left_over, moved)]
            partner = np.take_along_axis(order, np.take_along_axis(position, choice, axis=1), axis=1)[:, 0]
            candidate = (found[0], found[1], choice[:, 0], partner)
            best = candidate if best is None else tuple(np.where(candidate[0] < best[0], c, b) for c, b in zip(candidate, best))
        assert best is not None
        moved = np.where(best[0] < KEY_LIMIT, best[1], 0)
        return moved, best[2], best[3]

    def apply(self, heavy: IntArray, light: IntArray, moved: IntArray, give: IntArray, take: IntArray, size: int) -> None:
        """Swap the chosen column sets of disjoint pairs."""
        sets = _subsets(self.members.shape[1], size)
        rows_h, rows_l, columns_h, columns_l = heavy[:, None], light[:, None], sets[give], sets[take]
        kept = self.members[rows_h, columns_h]
        self.members[rows_h, columns_h] = self.members[rows_l, columns_l]
        self.members[rows_l, columns_l] = kept
        self.load[heavy] -= moved
        self.load[light] += moved

    def _sums(self, rows: IntArray, sets: IntArray) -> IntArray:
        weights = self.weights[self.members[rows]]
        total: IntArray = weights[:, sets[:, 0]]
        for column in range(1, sets.shape[1]):
            total = total + weights[:, sets[:, column]]
        return total

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


def level(exchange: Exchange, target: int, size: int, max_rounds: int) -> None:
    """Exchange between every row above the target and as many of the lightest rows, until all are below it or nothing helps.

    Args:
        exchange: The partition, changed in place.
        target: Load that is good enough.
        size: Entries that each side gives.
        max_rounds: Rounds at most; a clock would give every rank another answer.
    """
    half = len(exchange.load) // 2
    shift = 0
    for _ in range(max_rounds):
        order = np.argsort(-exchange.load, kind="stable")
        count = min(half, int((exchange.load > target).sum()))
        if count == 0 or shift >= half:
            return
        heavy, light = order[:count], np.roll(order[::-1][:half], -shift)[:count]
        moved, give, take = exchange.find(heavy, light, size)
        use = moved > 0
        if use.any():
            exchange.apply(heavy[use], light[use], moved[use], give[use], take[use], size)
        shift = 0 if use.all() else shift + 1


def settle(exchange: Exchange, target: int, sizes: tuple[int, ...], max_rounds: int) -> None:
    """Bring the rows above the target down to it, each by the exchange that costs the others least.

    Every round compares the heaviest rows with many partners. A row takes the smallest transfer that brings it to the target and keeps its
    partner there; without one, the exchange after which the heavier of the two is lightest. Larger exchanges are tried only when smaller
    ones no longer help.

    Args:
        exchange: The partition, changed in place.
        target: Load that is good enough.
        sizes: Entries that each side gives, tried in this order.
        max_rounds: Rounds at most.
    """
    stage = 0
    for _ in range(max_rounds):
        order = np.argsort(-exchange.load, kind="stable")
        num_heavy = int((exchange.load > target).sum())
        if num_heavy == 0 or stage == len(sizes):
            return
        num_sets = len(_subsets(exchange.members.shape[1], sizes[stage]))
        partners = order[max(1, num_heavy) :][::-1] if num_heavy < len(order) else order[1:][::-1]
        partners = partners[: max(8, PAIR_LIMIT // num_sets)]
        heavy = order[: max(1, min(num_heavy, PAIR_LIMIT // (num_sets * max(1, len(partners)))))]
        stage = 0 if _settle_round(exchange, target, heavy, partners, sizes[stage]) else stage + 1


def _settle_round(exchange: Exchange, target: int, heavy: IntArray, partners: IntArray, size: int) -> bool:
    """Apply at most one exchange per heavy row and per partner; say whether there was any."""
    rows, others = np.repeat(heavy, len(partners)), np.tile(partners, len(heavy))
    load_h, load_p = exchange.load[rows], exchange.load[others]
    excess, room = load_h - target, np.maximum(target - load_p, 0)
    aim = np.maximum(np.minimum((load_h - load_p) // 2, excess + (room - excess) // 8), 1)
    moved, give, take = exchange.find(rows, others, size, aim)
    after = np.maximum(load_h - moved, load_p + moved)
    score = np.where(after <= target, moved - KEY_LIMIT, after)  # reached: the smaller the transfer, the better
    score = np.where((moved > 0) & (after < load_h), score, KEY_LIMIT).reshape(len(heavy), len(partners))
    chosen: list[int] = []
    for i in range(len(heavy)):
        best = int(score[i].argmin())
        if score[i, best] < KEY_LIMIT:
            chosen.append(i * len(partners) + best)
            score[:, best] = KEY_LIMIT
    pick = np.array(chosen, dtype=np.int64)
    if chosen:
        exchange.apply(rows[pick], others[pick], moved[pick], give[pick], take[pick], size)
    return bool(chosen)
