"""Read prompts from files, functions and data sets, and turn them into token ids."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlbatch.data.prompts import PromptBatch, Tokenizer
from lightning_rlbatch.data.sources import import_callable

PromptSource: TypeAlias = str | Callable[[], Sequence[Mapping[str, Any]]]
"""A function that returns rows with a ``prompt`` column, its import path, or the path of a JSONL file of such rows."""

TokenizerSource: TypeAlias = Callable[[], Any] | str | Any
"""A class or function that makes the tokenizer, the tokenizer itself, or the folder or hub name of a transformers one."""


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
    """
    rows = read_rows(source, name)
    prompts = [str(row["prompt"]) for row in rows]
    prompt_ids = [list(tokenizer.encode(prompt)) for prompt in prompts]
    kept = [index for index, ids in enumerate(prompt_ids) if 0 < len(ids) <= max_prompt_length]
    if len(kept) < len(rows):
        rank_zero_warn(
            f"{len(rows) - len(kept)} of {len(rows)} rows of {name} are left out: empty, or more than"
            f" max_prompt_length={max_prompt_length} tokens."
        )
    if not kept:
        raise ValueError(f"No row of {name} is left within max_prompt_length={max_prompt_length} tokens. Raise it.")
    return PromptBatch(
        prompts=[prompts[index] for index in kept],
        prompt_ids=[prompt_ids[index] for index in kept],
        columns=[{key: value for key, value in rows[index].items() if key != "prompt"} for index in kept],
        positions=list(range(len(kept))),
        rollouts_per_prompt=rollouts_per_prompt,
        max_response_length=max_response_length,
        tokenizer=tokenizer,
        seed=seed,
    )


def read_rows(source: PromptSource, name: str) -> list[dict[str, Any]]:
    """Read prompt rows.

    Args:
        source: See ``PromptSource``.
        name: Option to name in errors.

    Raises:
        ValueError: No rows, a row that is no JSON object, or one without a ``prompt``.
    """
    maker = source
    if isinstance(source, str) and not Path(source).is_file():
        found = import_callable(source)
        if found is None:
            raise ValueError(f"{name} is {source!r}, which is neither an existing file nor the import path of a function.")
        maker = found
    rows = _read_jsonl(maker, name) if isinstance(maker, str) else list(maker())
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise ValueError(f"{name}: row {number} must be an object with a 'prompt' but is {str(row)[:80]!r}.")
    if not rows:
        raise ValueError(f"{name} has no rows.")
    return [dict(row) for row in rows]


def _read_jsonl(path: str, name: str) -> list[Any]:
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{name}: line {number} of {path} is not JSON ({error}).") from None
    return rows


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Return the tokenizer that was configured; see ``TokenizerSource``."""
    if isinstance(source, str):
        from transformers import AutoTokenizer

        return cast(Tokenizer, AutoTokenizer.from_pretrained(source))
    # transformers' tokenizers are callable themselves
    is_tokenizer = hasattr(source, "encode") and not isinstance(source, type)
    return cast(Tokenizer, source if is_tokenizer else cast(Callable[[], Any], source)())
