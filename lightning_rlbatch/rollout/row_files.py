"""Read files of one object per row: JSON lines and Parquet."""

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

OnCut = Callable[[str], None]
"""Told in a sentence that the last line of a file was left out."""


def rows_of_file(path: Path, *, option: str | None = None, on_cut: OnCut | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with the words that name its place at the beginning of a sentence, such as ``"Line 3 of prompts.jsonl"``.

    Blank lines are passed over, and so is a byte order mark. Only a newline ends a line: text may hold other characters that Python
    takes for line ends.

    Args:
        path: A ``.parquet`` file; any other is read as JSON lines.
        option: Option that names the file, said first in places and errors (``"train_prompts: line 3 of prompts.jsonl"``).
        on_cut: What to do if the last line breaks off in the middle, as those of a writer that was ended do: it is left out, and this is
            told. None makes it an error.

    Raises:
        ValueError: A line that is no JSON object, or not UTF-8; a damaged file. The message names the place.
        ImportError: A Parquet file without pyarrow.
    """
    is_parquet = path.suffix == ".parquet"
    for number, row in _parquet_rows(path, option) if is_parquet else _json_rows(path, option, on_cut):
        yield _place("row" if is_parquet else "line", number, path, option), row


def completion_text(completion: Any) -> str:
    """Return the text of a completion as trainers dump it: a text, or the one message of the assistant.

    Raises:
        ValueError: It is something else, such as several turns, whose tokens nobody can tell apart any more. The message is the end of a
            sentence.
    """
    if isinstance(completion, str):
        return completion
    messages = list(completion) if isinstance(completion, list | tuple) else []
    if len(messages) == 1 and isinstance(messages[0], Mapping) and messages[0].get("role") == "assistant":
        content = messages[0].get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        if all(isinstance(text, str) for text in texts) and not messages[0].get("tool_calls"):
            return "".join(map(str, texts))
    raise ValueError(f"the completion must be text, or one message of the assistant with text, but is {repr(completion)[:80]}")


def _place(kind: str, number: int, path: Path, option: str | None) -> str:
    return f"{option}: {kind} {number} of {path}" if option else f"{kind.capitalize()} {number} of {path}"


def _json_rows(path: Path, option: str | None, on_cut: OnCut | None) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:  # in bytes, where a line ends at a newline and nowhere else
        for number, line in enumerate(file, start=1):
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            place = _place("line", number, path, option)
            try:
                row = _parse(line, place)
            except ValueError:
                if on_cut is None or line.endswith(b"\n"):
                    raise
                on_cut(f"The end of {path} breaks off: line {number} is left out.")
                return
            if not isinstance(row, dict):
                raise ValueError(f"{place} must be a JSON object but is {repr(row)[:80]}. Write one object per line.")
            yield number, row


def _parse(line: bytes, place: str) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 ({error.reason} at byte {error.start}). Convert the file.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}). Write one object per line.") from None


def _parquet_rows(path: Path, option: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    said = f"{option}: " if option else ""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{said}reading {path} needs pyarrow: pip install pyarrow, or convert the file to JSON lines.") from None
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{said}{path} is no whole Parquet file ({error}).") from None
    yield from enumerate(rows, start=1)
