"""Read the lengths of samples from a file."""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

LENGTH_FIELDS = ("length", "num_tokens", "seq_len", "n_tokens", "total_length")
_LIST_FIELDS = ("input_ids", "token_ids")


def read_lengths(path: str, field: str | None = None) -> list[int]:
    """Read sample lengths in tokens.

    Args:
        path: JSONL of numbers or of objects, one JSON list, or plain text with numbers between blanks, commas or line ends.
        field: Field of the objects that holds the length (or the list of tokens); None takes the first known one:
            ``length``, ``num_tokens``, ``seq_len``, ``n_tokens``, ``total_length``, ``input_ids``, ``token_ids``, or the sum of
            ``num_prompt_tokens`` and ``num_response_tokens``.

    Returns:
        Lengths in the order of the file.

    Raises:
        ValueError: The file is missing or empty, or a line has no length; the message names it.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"There is no file {path}. Pass a JSONL or text file of lengths.")
    lengths = [_length(item, place, field) for place, item in _items(file.read_text(encoding="utf-8-sig"), path)]
    if not lengths:
        raise ValueError(f"{path} holds no lengths.")
    return lengths


def _items(text: str, path: str) -> Iterator[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        with suppress(json.JSONDecodeError):  # several lists, one a line
            yield from ((f"item {number} of {path}", item) for number, item in enumerate(json.loads(text), start=1))
            return
    for number, line in enumerate(text.splitlines(), start=1):
        place, stripped = f"line {number} of {path}", line.strip()
        if not stripped:
            continue
        if stripped[0] in "{[":
            try:
                value = json.loads(stripped)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} is not JSON ({error}).") from None
            yield from ((place, item) for item in (value if isinstance(value, list) else [value]))
        else:
            yield from ((place, word) for word in stripped.replace(",", " ").split())


def _length(item: Any, place: str, field: str | None) -> int:
    value = item
    if isinstance(item, dict):
        value = _field(item, place, field)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = len(value)
    try:
        length = int(value)
        exact = float(value) == length
    except (TypeError, ValueError, OverflowError):  # the last: infinite
        exact, length = False, -1
    if isinstance(value, bool) or not exact or length < 1:
        raise ValueError(f"{place} has the length {value!r}, but a length is a whole number of at least 1 token.")
    return length


def _field(item: dict[str, Any], place: str, field: str | None) -> Any:
    if field is None and all(isinstance(item.get(name), int) for name in ("num_prompt_tokens", "num_response_tokens")):
        return item["num_prompt_tokens"] + item["num_response_tokens"]
    for name in (field,) if field is not None else (*LENGTH_FIELDS, *_LIST_FIELDS):
        if name in item:
            return item[name]
    wanted = f"no field {field!r}" if field is not None else f"none of the fields {', '.join((*LENGTH_FIELDS, *_LIST_FIELDS))}"
    raise ValueError(f"{place} has {wanted}; it has {', '.join(item)}. Pass --field NAME.")
