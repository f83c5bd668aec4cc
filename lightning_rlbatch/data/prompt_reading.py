"""Read prompts from files, functions and data sets, and turn them into token ids."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlbatch.data.chat import as_conversation, encode_rendered, render
from lightning_rlbatch.data.prompts import PromptBatch, Tokenizer
from lightning_rlbatch.data.sources import import_callable
from lightning_rlbatch.rollout.row_files import rows_of_file

PromptSource: TypeAlias = str | list[str] | Callable[[], Any] | Sequence[Mapping[str, Any]]
"""Rows with a ``prompt`` column: the path of a JSONL or Parquet file, several such paths, a function that returns rows or its import
path, a ``datasets`` object, a pandas or polars ``DataFrame``, a torch ``Dataset``, or any sequence of rows. A stream is read to its end:
the order of each pass is drawn among all prompts."""

TokenizerSource: TypeAlias = str | Callable[[], Any] | Any
"""The folder or hub name of a transformers tokenizer, a class or function that makes a tokenizer, its import path, or the tokenizer."""

_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # of a conversational row: what its chat template is given
_ARGUMENTS = ("prompts", "completions", "completion_ids")  # of reward functions: a column of that name would take their place
_OTHER_FORMATS = ("pandas", "polars", "arrow", "numpy")  # of a datasets object: rows are tables of one row, or messages are arrays


def read_prompts(
    source: PromptSource,
    tokenizer: Tokenizer,
    *,
    name: str,
    rollouts_per_prompt: int,
    max_prompt_length: int,
    max_response_length: int,
    seed: int,
) -> PromptBatch:
    """Read all prompts of a source; those that are empty or too long are left out, with a warning that counts them.

    A prompt is a text, or a list of messages that the tokenizer's chat template turns into one; the columns ``tools`` and
    ``chat_template_kwargs`` of such a row are given to the template.

    Args:
        source: See ``PromptSource``.
        tokenizer: Encodes the prompts.
        name: Option to name in errors.
        rollouts_per_prompt: Responses per prompt.
        max_prompt_length: Most tokens of a prompt.
        max_response_length: Most tokens of a response.
        seed: Seed of the run.

    Raises:
        ValueError: See :func:`read_rows`; a prompt that the tokenizer or its chat template refuses; or no row is left.
        TypeError: See :func:`read_rows`.
    """
    placed = list(_placed_rows(source, name))
    rows = [row for _, row in placed]
    conversations = [_conversation(row, place) for place, row in placed]
    encoded = [_encode(row, conversation, tokenizer, place) for (place, row), conversation in zip(placed, conversations)]
    kept = [index for index, (_, ids) in enumerate(encoded) if 0 < len(ids) <= max_prompt_length]
    if len(kept) < len(rows):
        rank_zero_warn(
            f"{len(rows) - len(kept)} of {len(rows)} rows of {name} are left out: empty, or more than"
            f" max_prompt_length={max_prompt_length} tokens."
        )
    if not kept:
        raise ValueError(f"No row of {name} is left within max_prompt_length={max_prompt_length} tokens. Raise it.")
    # Of all rows, so that reward functions get the same columns in every iteration.
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "prompt"))
    return PromptBatch(
        prompts=[encoded[index][0] for index in kept],
        prompt_ids=[encoded[index][1] for index in kept],
        columns=[{key: rows[index].get(key) for key in columns} for index in kept],
        positions=list(range(len(kept))),
        rollouts_per_prompt=rollouts_per_prompt,
        max_response_length=max_response_length,
        tokenizer=tokenizer,
        seed=seed,
        conversations=[conversations[index] for index in kept] if any(conversations) else None,
    )


def template_options(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template that a row brings along."""
    tools, arguments = (columns.get(key) for key in _TEMPLATE_COLUMNS)
    return {**({} if tools is None else {"tools": tools}), **(arguments or {})}


def _conversation(row: Mapping[str, Any], place: str) -> Any:
    try:
        return as_conversation(row["prompt"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None


def _encode(row: Mapping[str, Any], conversation: Any, tokenizer: Tokenizer, place: str) -> tuple[str, list[int]]:
    try:
        if conversation is None:
            return row["prompt"], list(tokenizer.encode(row["prompt"]))
        text = render(tokenizer, conversation, template_options(row))
        return text, encode_rendered(tokenizer, text)
    except Exception as error:  # a tokenizer or its template may raise anything
        raise ValueError(f"{place} has a prompt that cannot be tokenized ({type(error).__name__}: {error}).") from error


def read_rows(source: PromptSource, name: str) -> list[dict[str, Any]]:
    """Read prompt rows.

    Args:
        source: See ``PromptSource``.
        name: Option to name in errors.

    Raises:
        ValueError: No rows, a row that is no object, one without a ``prompt``, or one with a column that reward functions could not be
            given; the message names the file and the line.
        TypeError: The source is none of those that can be read.
        ImportError: A Parquet file without pyarrow.
    """
    return [row for _, row in _placed_rows(source, name)]


def _placed_rows(source: PromptSource, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield checked rows with the words that name their place."""
    is_empty = True
    for place, row in _rows(source, name):
        is_empty = False
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise ValueError(f"{place} must be an object with a 'prompt' but is {repr(row)[:80]}.")
        hidden = [column for column in _ARGUMENTS if column in row]
        if hidden:
            raise ValueError(
                f"{place} has a column {hidden[0]!r}, which would hide what reward functions get under this name. Rename or drop it."
            )
        yield place, dict(row)
    if is_empty:
        raise ValueError(f"{name} has no rows" + (f": {os.fspath(source)} is empty." if isinstance(source, str | os.PathLike) else "."))


def _rows(source: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if not path.is_file():
            yield from _rows(_imported(source, name), name)
        else:
            yield from rows_of_file(path, option=name)
        return
    if callable(source):
        yield from _rows(source(), name)
        return
    if isinstance(source, Mapping):
        raise TypeError(f"{name} holds several splits, {', '.join(map(repr, list(source)[:5]))}. Pass one of them.")
    rows = _listed(source)
    if rows is None:
        raise TypeError(f"{name} must be a file, a function or rows, but is of type {type(source).__name__}.")
    if not rows or not all(isinstance(row, str | os.PathLike) for row in rows):
        yield from ((f"{name}: row {number}", row) for number, row in enumerate(rows))
        return
    missing = [os.fspath(path) for path in rows if not Path(path).is_file()]
    if missing:
        raise ValueError(f"{name}: no such file: {missing[0]!r}.")
    for path in rows:
        yield from rows_of_file(Path(path), option=name)


def _listed(source: Any) -> list[Any] | None:
    """Return the rows of an object that holds them; None if it holds none."""
    if hasattr(source, "columns") and hasattr(source, "to_dict"):  # a DataFrame, which iterates over its columns
        rows: list[Any] = source.to_dicts() if hasattr(source, "to_dicts") else source.to_dict("records")  # polars, pandas
        return [_without_arrays(row) for row in rows]
    if hasattr(source, "with_format") and getattr(source, "format", {}).get("type") in _OTHER_FORMATS:
        source = source.with_format(None)
    if isinstance(source, Iterable):
        return list(source)
    is_map_style = hasattr(source, "__len__") and hasattr(source, "__getitem__")  # a torch Dataset, which may know no end but its length
    return [source[index] for index in range(len(source))] if is_map_style else None


def _without_arrays(value: Any) -> Any:
    """Return a value whose arrays are lists: pandas reads lists in Parquet files, such as those of messages, as arrays."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    if isinstance(value, list | np.ndarray):
        return [_without_arrays(item) for item in value]
    return value


def _imported(source: str | os.PathLike[str], name: str) -> Callable[..., Any]:
    given = os.fspath(source)
    if Path(given).is_dir():
        raise ValueError(f"{name} is {given!r}, a folder. Name the files in it.")
    found = import_callable(given) if isinstance(source, str) else None
    if found is None:
        raise ValueError(f"{name} is {given!r}, which is neither an existing file nor the import path of a function.")
    return found


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Return the tokenizer that was configured; see ``TokenizerSource``."""
    if isinstance(source, str):
        maker = import_callable(source)
        if maker is not None:
            return cast(Tokenizer, maker())
        from transformers import AutoTokenizer

        from lightning_rlbatch.models.pretrained import TOKENIZER_FILES, require_pretrained

        require_pretrained(source, "tokenizer", TOKENIZER_FILES)
        return cast(Tokenizer, AutoTokenizer.from_pretrained(source))
    # transformers' tokenizers are callable themselves
    is_tokenizer = hasattr(source, "encode") and not isinstance(source, type)
    return cast(Tokenizer, source if is_tokenizer else cast(Callable[[], Any], source)())
