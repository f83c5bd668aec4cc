"""What options of other trainers are called here: one set of tables for the answers of ``rlbatch`` and for the documentation."""

import fnmatch
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CODE = re.compile(r"`([^`]+)`")
_LIST = re.compile(r"`[^`]+`(?:, `[^`]+`)*")
_ASSIGNMENT = re.compile(r"\s*[:=]\s*")


class Tables:
    """The Markdown file with one section of tables for each trainer.

    Args:
        file: Sections begin with ``## name``; rows are ``| their names | ours | remark |``.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    @functools.cached_property
    def sections(self) -> dict[str, str]:
        """Text of the sections by the trainer's name, in the order of the file."""
        parts = re.split(r"^## (.+)$", self.file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
        return {name: text.strip() for name, text in zip(parts[::2], parts[1::2])}

    def read(self, trainer: str) -> str:
        """Return the tables of one trainer as Markdown.

        Args:
            trainer: Such as ``verl``.
        """
        return self.sections[trainer]

    @functools.cached_property
    def entries(self) -> tuple["Entry", ...]:
        """Every name of every table."""
        rows = ((trainer, row) for trainer, text in self.sections.items() for row in text.splitlines())
        return tuple(entry for trainer, row in rows for entry in _entries(trainer, row))


@dataclass(frozen=True)
class Entry:
    """One name of another trainer.

    Attributes:
        trainer: Whose name it is.
        theirs: Name, with the end of its path and with a value where the table gives them: ``actor.ppo_epochs``, ``loss_type: dapo``.
        ours: What stands for it here, as Markdown; empty if there is nothing.
        remark: More about it; may be empty.
    """

    trainer: str
    theirs: str
    ours: str
    remark: str

    @property
    def name(self) -> str:
        """The name without its value."""
        return _ASSIGNMENT.split(self.theirs)[0]

    @property
    def value(self) -> str | None:
        """The value that this entry is about; None for all values."""
        return (_ASSIGNMENT.split(self.theirs, maxsplit=1)[1:] or [None])[0]

    def matching_parts(self, asked: str) -> int:
        """Return how many parts, from the last one on, a dotted name has in common with this one; 0 if it is another name."""
        count = 0
        for part, pattern in zip(reversed(asked.split(".")), reversed(self.name.split("."))):
            if not fnmatch.fnmatchcase(part, pattern):
                break
            count += 1
        return count

    def __str__(self) -> str:
        whose = "" if self.trainer == "other code" else f"That is {self.trainer}'s `{self.theirs}`; "
        remark = f" - {self.remark}" if self.remark else ""
        return f"{whose}{'here' if whose else 'Here'}: {self.ours or 'no counterpart'}{remark}."


def _entries(trainer: str, row: str) -> Iterator[Entry]:
    cells = [cell.strip() for cell in row.split("|")]
    theirs = _CODE.findall(cells[1]) if len(cells) == 5 else []
    if not theirs:
        return  # a heading, or a rule
    ours = cells[2].removeprefix("-").lstrip("; ")
    each = _CODE.findall(ours)
    paired = len(each) == len(theirs) and _LIST.fullmatch(ours) is not None
    for index, name in enumerate(theirs):
        yield Entry(trainer, name, f"`{each[index]}`" if paired else ours, cells[3])


TABLES = Tables(Path(__file__).with_name("other_trainers.md"))


def translate(name: str, value: Any = None) -> Entry | None:
    """Find what an option of another trainer is called here.

    Args:
        name: Alone or with its path, such as ``kl_coef`` or ``actor_rollout_ref.actor.ppo_max_token_len_per_gpu``.
        value: That it is set to; some names mean another option for each value.

    Returns:
        The entry that agrees with most of the path; None if no table has the name.

    Example:
        >>> print(translate("num_generations"))
        That is TRL's `num_generations`; here: `rollouts_per_prompt`.
    """
    # Of names that end alike the one with the shortest path is meant: `n` is rollout.n before rollout.val_kwargs.n.
    scored = [((entry.matching_parts(name), -entry.name.count(".")), entry) for entry in TABLES.entries]
    best = max(score for score, _ in scored)
    found = [entry for score, entry in scored if score == best and best[0] > 0]
    exact = [entry for entry in found if entry.value == str(value)]
    general = exact or [entry for entry in found if entry.value is None]
    if general or not found:
        return general[0] if general else None
    by_value = "; ".join(f"`{entry.value}` is {entry.ours or 'not here'}" for entry in found)
    return Entry(found[0].trainer, found[0].name, f"by its value, {by_value}", "")
