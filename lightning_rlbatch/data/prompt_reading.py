"""Read prompts from files, functions and data sets, and turn them into token ids."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlbatch.data.chat import as_conversation, encode_rendered, render
from lightning_rlbatch.data.prompts import PromptBatch, Tokenizer
from lightning_rlbatch.data.sources import import_callable

PromptSource: TypeAlias = str | list[str] | Callable[[], Any] | Sequence[Mapping[str, Any]]
"""Rows with a ``prompt`` column: the path of a JSONL or Parquet file, several such paths, a function that returns rows or its import
path, a ``datasets`` object, or any sequence of rows."""

TokenizerSource: TypeAlias = str | Callable[[], Any] | Any
"""The folder or hub name of a transformers tokenizer, a class or function that makes a tokenizer, its import path, or the tokenizer."""

_TEMPLATE_COLUMNS = ("tools", "chat_template_kwargs")  # of a conversational row: what its chat template is given


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
        ValueError: See :func:`read_rows`; or no row is left.
        TypeError: Prompts are messages but the tokenizer has no chat template.
    """
    rows = read_rows(source, name)
    conversations = [_conversation(row, f"{name}: row {number}") for number, row in enumerate(rows)]
    encoded = [_encode(row, conversation, tokenizer) for row, conversation in zip(rows, conversations)]
    kept = [index for index, (_, ids) in enumerate(encoded) if 0 < len(ids) <= max_prompt_length]
    if len(kept) < len(rows):
        rank_zero_warn(
            f"{len(rows) - len(kept)} of {len(rows)} rows of {name} are left out: empty, or more than"
            f" max_prompt_length={max_prompt_length} tokens."
        )
    if not kept:
        raise ValueError(f"No row of {name} is left within max_prompt_length={max_prompt_length} tokens. Raise it.")
    return PromptBatch(
        prompts=[encoded[index][0] for index in kept],
        prompt_ids=[encoded[index][1] for index in kept],
        columns=[{key: value for key, value in rows[index].items() if key != "prompt"} for index in kept],
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


def _encode(row: Mapping[str, Any], conversation: Any, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    if conversation is None:
        return row["prompt"], list(tokenizer.encode(row["prompt"]))
    text = render(tokenizer, conversation, template_options(row))
    return text, encode_rendered(tokenizer, text)


def read_rows(source: PromptSource, name: str) -> list[dict[str, Any]]:
    """Read prompt rows.

    Args:
        source: See ``PromptSource``.
        name: Option to name in errors.

    Raises:
        ValueError: No rows, a row that is no JSON object, or one without a ``prompt``.
        TypeError: The source is none of those that can be read.
        ImportError: A Parquet file without pyarrow.
    """
    rows = list(_rows(source, name))
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise ValueError(f"{name}: row {number} must be an object with a 'prompt' but is {str(row)[:80]!r}.")
    if not rows:
        raise ValueError(f"{name} has no rows.")
    return [dict(row) for row in rows]


def _rows(source: Any, name: str) -> Iterable[Any]:
    if isinstance(source, str):
        return _read_file(Path(source), name) if Path(source).is_file() else _rows(_imported(source, name), name)
    if callable(source):
        return _rows(source(), name)
    if isinstance(source, Mapping):
        raise TypeError(f"{name} holds several splits, {', '.join(map(repr, list(source)[:5]))}. Pass one of them.")
    if not isinstance(source, Iterable):
        raise TypeError(f"{name} must be a file, a function or rows, but is of type {type(source).__name__}.")
    rows = list(source)
    if not rows or not all(isinstance(row, str) for row in rows):
        return rows
    missing = [path for path in rows if not Path(path).is_file()]
    if missing:
        raise ValueError(f"{name}: no such file: {missing[0]!r}.")
    return [row for path in rows for row in _read_file(Path(path), name)]


def _imported(source: str, name: str) -> Callable[..., Any]:
    found = import_callable(source)
    if found is None:
        raise ValueError(f"{name} is {source!r}, which is neither an existing file nor the import path of a function.")
    return found


def _read_file(path: Path, name: str) -> list[Any]:
    return _read_parquet(path, name) if path.suffix == ".parquet" else _read_jsonl(path, name)


def _read_jsonl(path: Path, name: str) -> list[Any]:
    rows = []
    # Lines end with a newline only: JSON text may hold other characters that count as line ends in Python.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}: line {number} of {path} is not JSON ({error}).") from None
    return rows


def _read_parquet(path: Path, name: str) -> list[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{name}: reading {path} needs pyarrow: pip install pyarrow, or convert the file to JSON lines.") from None
    rows: list[Any] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Return the tokenizer that was configured; see ``TokenizerSource``."""
    if isinstance(source, str):
        maker = None if Path(source).is_dir() else import_callable(source)
        if maker is not None:
            return cast(Tokenizer, maker())
        from transformers import AutoTokenizer

        from lightning_rlbatch.models.pretrained import TOKENIZER_FILES, require_pretrained

        require_pretrained(source, "tokenizer", TOKENIZER_FILES)
        return cast(Tokenizer, AutoTokenizer.from_pretrained(source))
    # transformers' tokenizers are callable themselves
    is_tokenizer = hasattr(source, "encode") and not isinstance(source, type)
    return cast(Tokenizer, source if is_tokenizer else cast(Callable[[], Any], source)())
