"""A debug check that all ranks are about to do the same thing, which names the first difference."""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from lightning_rlbatch.distributed.reductions import all_gather_ints, gather_strings, group_size, stable_hash

Plain: TypeAlias = "str | int | bool | list[Plain] | dict[str, Plain] | None"

_HISTORY = 5  # phases that an error lists per rank


class CollectiveCheck:
    """Compare what the ranks are about to do before each phase, for ``check_collectives: true``.

    Ranks that disagree on the step, the plan or the phase wait for each other in different collectives, and the timeout that ends it
    says nothing about the cause. A call costs one all-gather of 16 bytes per rank; nothing when disabled.

    Args:
        group: Ranks that must agree; None for a process that runs alone.
        enabled: False makes every call return at once. It must be the same on all ranks.

    Example:
        >>> check = CollectiveCheck(None)
        >>> check("policy update", step=3, plan=[[[0, 2]], [[1]]])
    """

    def __init__(self, group: dist.ProcessGroup | None, *, enabled: bool = True) -> None:
        self.group = group
        self.enabled = enabled
        self._history: list[str] = []
        self._num_calls = 0

    def __call__(self, phase: str, **facts: Any) -> None:
        """Check that all ranks enter this phase with the same facts.

        Args:
            phase: What comes next.
            **facts: What must be the same everywhere, by name: numbers, strings, lists, mappings, tensors (a plan's assignment, the
                step, the number of micro-steps, the seed).

        Raises:
            TypeError: A fact is an object of another kind.
            RuntimeError: Something differs. The same error on every rank, naming the first difference and the phases before it.
        """
        if not self.enabled or group_size(self.group) == 1:
            return
        assert self.group is not None
        self._num_calls += 1
        described: dict[str, Plain] = {"phase": phase, "number of checks": self._num_calls, **{key: _plain(facts[key]) for key in facts}}
        text = json.dumps(described)
        # Two different hashes of 62 bits: a coincidence is out of the question.
        hashes = all_gather_ints([stable_hash(text), stable_hash("again " + text)], self.group)
        if all(row == hashes[0] for row in hashes):
            self._history = [*self._history, phase][-_HISTORY:]
            return
        ranks = dist.get_process_group_ranks(self.group)
        texts = [json.loads(other) for other in gather_strings(text, self.group)]
        histories = gather_strings(" > ".join(self._history) or "nothing", self.group)
        other = next(index for index, row in enumerate(hashes) if row != hashes[0])
        where, first, second = _first_difference("", texts[0], texts[other])
        raise RuntimeError(
            f"Ranks {ranks[0]} and {ranks[other]} are about to do different things: {where} is {first} on rank {ranks[0]} and {second} on "
            f"rank {ranks[other]} (phase '{texts[0]['phase']}' and '{texts[other]['phase']}'; checked before: "
            f"{histories[0]} and {histories[other]}). Every rank must make its decisions from data that all ranks hold."
        )


def _plain(value: Any) -> Plain:
    """Return a value as something that JSON can write, with tensors as lists."""
    if isinstance(value, Tensor) or hasattr(value, "tolist"):  # and numpy's arrays and numbers
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        return [str(item) for item in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value.hex()  # exact, and NaN equals NaN
    # Not repr: it may hold an address, which differs between ranks that agree.
    raise TypeError(f"A fact must be made of numbers, strings, lists, mappings or tensors, got {type(value).__name__}.")


def _first_difference(path: str, first: Plain, second: Plain) -> tuple[str, str, str]:
    """Return the path of the first difference and its two values."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            if key not in first or key not in second:
                return f"`{path}{key}`", "present" if key in first else "absent", "present" if key in second else "absent"
            if first[key] != second[key]:
                return _first_difference(f"{path}{key}." if isinstance(first[key], dict) else path + key, first[key], second[key])
    if isinstance(first, list) and isinstance(second, list):
        for index, (left, right) in enumerate(zip(first, second)):
            if left != right:
                return _first_difference(f"{path}[{index}]", left, right)
        return f"the length of `{path}`", str(len(first)), str(len(second))
    return f"`{path.rstrip('.')}`", json.dumps(first)[:200], json.dumps(second)[:200]
