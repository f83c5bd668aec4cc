"""What stands in files of prompts: their rows, their columns, and the first line that a run would stumble over."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlbatch.cli.run_config import load_pure

MOST_BYTES = 32 * 2**20  # read of a file, so that explain answers within seconds
TOLD = ("prompts", "completions", "completion_ids")  # what reward functions are given beside columns, and which no column may hide
_NO_TEXT = ("int", "uint", "float", "double", "halffloat", "bool", "null", "decimal", "date", "time")  # types of Parquet columns
GIVEN = (*TOLD, "log_metric", "log_extra", "trainer_state")


@dataclass(frozen=True)
class PromptFile:
    """What a file holds.

    Attributes:
        num_rows: Rows with a prompt; None if not all were read.
        columns: Of any row.
        problem: Why a run would refuse the file; None if it would not.
        places: Number of rows that were looked at, in words.
    """

    num_rows: int | None
    columns: frozenset[str] = frozenset()
    problem: str | None = None
    places: str = ""


def prompt_files(source: Any) -> list[str]:
    """Return the files that a source of prompts names; none for functions and rows.

    Args:
        source: As configured.
    """
    paths = [source] if isinstance(source, str) else source if isinstance(source, list) else []
    return [path for path in paths if isinstance(path, str) and Path(path).is_file()]


def count_rows(source: Any) -> int | None:
    """Return the rows of a source of prompts; None if it is no file, or too large to be read here.

    Args:
        source: As configured.
    """
    counts = [read_prompt_file(path).num_rows for path in prompt_files(source)]
    return sum(count for count in counts if count is not None) if counts and None not in counts else None


def read_prompt_file(path: str) -> PromptFile:
    """Read a file as a run would, the first ``MOST_BYTES`` of it.

    Args:
        path: JSON lines, or Parquet.
    """
    found = Path(path).stat()
    return _read(path, Path.cwd(), found.st_mtime_ns, found.st_size)


@functools.cache
def _read(path: str, folder: Path, changed: int, size: int) -> PromptFile:
    """Read a file once, as long as it does not change."""
    file = Path(path)
    try:
        return _read_parquet(file) if file.suffix == ".parquet" else _read_lines(file)
    except (ValueError, ImportError) as error:
        return PromptFile(None, problem=str(error))
    except OSError as error:
        return PromptFile(None, problem=f"{path} cannot be read: {error}.")


def _read_lines(file: Path) -> PromptFile:
    whole = file.stat().st_size <= MOST_BYTES
    number, columns = 0, set[str]()
    for place, row, read in _rows(file):
        problem = _row_problem(place, row)
        if problem is not None:
            return PromptFile(None, problem=problem)
        number += 1
        columns |= row.keys()
        if not whole and read > MOST_BYTES:
            return PromptFile(None, frozenset(columns), places=f"the first {number:,} rows of {file}")
    return PromptFile(number, frozenset(columns), None if number else f"{file} has no rows: it is empty.")


def _rows(file: Path) -> Iterator[tuple[str, Any, int]]:
    read = 0
    for place, row in load_pure("rollout.row_files").rows_of_file(file):
        read += sum(len(str(value)) for value in row.values())
        yield place, row, read


def _row_problem(place: str, row: Mapping[str, Any]) -> str | None:
    if "prompt" not in row:
        return f"{place} has no column 'prompt'; it has {', '.join(map(repr, row)) or 'none'}. Rename one of them, or add it."
    prompt = row["prompt"]
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(isinstance(item, Mapping) for item in prompt)):
        return f"{place}: column 'prompt' must be text, or a list of messages, but is {repr(prompt)[:80]}."
    return hidden_column(place, row)


def hidden_column(place: str, columns: Any) -> str | None:
    """Return what is wrong with the names of columns, None if nothing.

    Args:
        place: Of the row or file.
        columns: Their names.
    """
    hidden = [column for column in TOLD if column in columns]
    if not hidden:
        return None
    return f"{place} has a column {hidden[0]!r}, which would hide what reward functions get under this name. Rename or drop it."


def _read_parquet(file: Path) -> PromptFile:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"reading {file} needs pyarrow: pip install pyarrow, or convert the file to JSON lines.") from None
    try:
        content = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is no whole Parquet file ({error}).") from None
    columns, number = content.schema_arrow.names, content.metadata.num_rows
    problem = hidden_column(str(file), columns)
    if "prompt" not in columns:
        problem = f"{file} has no column 'prompt'; it has {', '.join(map(repr, columns)) or 'none'}. Rename one of them, or add it."
    elif str(kind := content.schema_arrow.field("prompt").type).startswith(_NO_TEXT):
        problem = f"{file}: column 'prompt' must hold text, or lists of messages, but holds {kind}."
    elif not number:
        problem = f"{file} has no rows: it is empty."
    return PromptFile(number, frozenset(columns), problem)
