"""One finding about a configuration."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["refused", "without effect", "note"]


@dataclass(frozen=True)
class Finding:
    """A sentence about one or more options.

    Attributes:
        level: ``refused``: the run would not start; ``without effect``: the option changes nothing; ``note``: worth knowing.
        options: Options that it is about, by their names in the constructor.
        text: What is needed, what was got, what to do.
    """

    level: Level
    options: tuple[str, ...]
    text: str


Findings = Iterator[Finding]


def refused(*options: str, text: str) -> Finding:
    """Return a finding that stops the run."""
    return Finding("refused", options, text)


def without_effect(option: str, text: str) -> Finding:
    """Return a finding about an option that changes nothing."""
    return Finding("without effect", (option,), text)


def note(*options: str, text: str) -> Finding:
    """Return a finding that is no fault."""
    return Finding("note", options, text)
