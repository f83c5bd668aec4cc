"""Files of logged rollouts: JSON lines or Parquet, one per data-parallel rank."""

import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

FileFormat: TypeAlias = Literal["jsonl", "parquet"]
COLUMNS = {
    "iteration": "int64",
    "group_id": "int64",
    "sample_id": "int64",
    "prompt": "string",
    "completion": "string",
    "reward": "float64",
    "advantage": "float64",
    "num_response_tokens": "int64",
}
"""Name and Arrow type of every column."""
EXTRA = "extra"
"""One more column where reward functions logged some of their own: a mapping, which Parquet files have as JSON text."""


def check_format(file_format: str) -> None:
    """Refuse a format that cannot be written here, before anything is trained.

    Raises:
        ValueError: An unknown format.
        ImportError: Parquet without pyarrow.
    """
    if file_format not in ("jsonl", "parquet"):
        raise ValueError(f"Expected file_format to be 'jsonl' or 'parquet' but got {file_format!r}.")
    # Looked for, not imported: Arrow starts threads, and launchers may fork after this.
    if file_format == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ImportError("file_format='parquet' needs pyarrow: pip install 'lightning-rlbatch[parquet]', or write 'jsonl'.")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], file_format: FileFormat, *, with_extra: bool = False) -> None:
    """Write rows with the columns of ``COLUMNS``, and maybe ``EXTRA``, under another name until the file is whole.

    Args:
        path: File to write; its folder is created.
        rows: Any number, none included: then a Parquet file has its columns still.
        file_format: ``"jsonl"`` or ``"parquet"``.
        with_extra: Whether rows, also those of other ranks, have ``EXTRA``.
    """
    if file_format == "jsonl":
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    else:
        _replace(path, lambda temporary: _write_parquet(temporary, rows, with_extra))


def extra_text(row: Mapping[str, Any]) -> str:
    """Return the extra columns of a row as JSON."""
    return json.dumps(row.get(EXTRA, {}), ensure_ascii=False)


def write_text(path: Path, text: str) -> None:
    """Write a text file, under another name until it is whole; its folder is created."""
    # Halves of characters (lone surrogates, which byte-level tokenizers can produce) have no UTF-8.
    _replace(path, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], with_extra: bool) -> None:
    import pyarrow
    import pyarrow.parquet

    # Types are stated, or a column of missing values would differ from file to file.
    types = COLUMNS | ({EXTRA: "string"} if with_extra else {})
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in types.items()])
    columns = {name: [extra_text(row) if name == EXTRA else row[name] for row in rows] for name in types}
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), path)
