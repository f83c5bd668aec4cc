"""Read rollouts that other trainers dumped as text."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlbatch.data.chat import as_conversation, encode_rendered, render
from lightning_rlbatch.data.prompts import Tokenizer
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.functional.schema import Schema
from lightning_rlbatch.rollout.dispatch import contiguous_share
from lightning_rlbatch.rollout.recorded_files import natural_order
from lightning_rlbatch.rollout.row_files import completion_text, rows_of_file

PROMPT_KEYS = ("prompt", "input")
COMPLETION_KEYS = ("completion", "output")
REWARD_KEYS = ("reward", "score")
ITERATION_KEYS = ("iteration", "step")
GROUP_KEYS = ("group_id", "uid")
_VERL_SAMPLE = re.compile(r"(.+)_\d+_\d+")  # verl's v1 trainer dumps {uid}_{rollout}_{output} as the uid of each row


class RolloutDump:
    """Rollouts that other trainers wrote, one row per rollout with prompt, completion and reward, as JSON lines or Parquet.

    Read are verl's ``rollout_data_dir`` (a file per step; ``input``, ``output``, ``score``, ``step``), TRL's logged completions
    (``prompt``, ``completion``, a column per reward function, ``step``), and the files of :class:`RolloutLogger`. Rows of one
    ``iteration`` or ``step`` are an iteration; without such a column each file is one. Rows with the same ``group_id`` or ``uid``, or
    without those the same prompt, are a group; groups may differ in size. A missing reward (null) leaves its rollout out of training.
    A last line that breaks off, as a trainer leaves it that was ended, is left out with a warning, and so are completions without tokens.

    Prompts may be messages, for the tokenizer's chat template, and completions the one message of the assistant. Text is tokenized
    again, so token boundaries may differ from the sampled ones, and special tokens that a dump left out are lost (verl leaves out those
    of the chat template). Rows with token ids (``prompt_ids``, ``completion_ids``, for rollouts of a generator of your own) are taken
    as they are. Log-probs are computed again by the policy.

    Args:
        path: A ``.jsonl``/``.parquet`` file, or a folder that is searched for such files.
        tokenizer: Of the policy.
        reward_columns: Columns whose sum is the reward; None takes ``reward``, or ``score`` (first in verl's rows).
        append_eos: End every completion with the end token, which the dumps leave out. Completions that were cut off at the length
            limit get it too, since nothing in a dump tells them apart.

    Raises:
        ValueError: No files, no rows, or a row that lacks something; the message names file and line.
    """

    def __init__(
        self, path: str | Path, tokenizer: Tokenizer, *, reward_columns: Sequence[str] | None = None, append_eos: bool = True
    ) -> None:
        self.path = Path(path)
        self._tokenizer = tokenizer
        self._reward_columns = reward_columns
        self._append_eos = append_eos
        if append_eos and tokenizer.eos_token_id is None:
            raise ValueError("append_eos needs a tokenizer with eos_token_id but it is None. Pass append_eos=False.")
        self._paths: dict[int, list[Path]] = {}
        self._group_sizes: dict[int, dict[str, int]] = {}
        num_rows = num_empty = 0
        for number, file in enumerate(dump_files(self.path)):
            for place, row in rows_of_file(file, on_cut=rank_zero_warn):
                self._check(row, place)
                num_rows += 1
                if self._is_empty(row, place):
                    num_empty += 1
                    continue
                iteration = iteration_of(row, number, place)
                if file not in (paths := self._paths.setdefault(iteration, [])):
                    paths.append(file)
                sizes = self._group_sizes.setdefault(iteration, {})
                sizes[group_of(row)] = sizes.get(group_of(row), 0) + 1
        if num_empty:
            rank_zero_warn(f"{num_empty} of {num_rows} rows of {self.path} are left out: a completion without tokens teaches nothing.")
        if not self._paths:
            raise ValueError(f"{self.path} has no rollouts. Expected one row per rollout, with prompt, completion and reward.")
        self.iterations = sorted(self._paths)
        self.num_prompts = max(len(sizes) for sizes in self._group_sizes.values())

    def seed(self, iteration: int) -> int:
        """Return 0: a dump does not know its run's seed."""
        return 0

    def rollouts_per_prompt(self, iteration: int) -> int:
        """Return the size of the iteration's largest group."""
        return max(self._group_sizes[iteration].values())

    def schema(self, iteration: int) -> Schema:
        """Return the fields of an iteration's samples."""
        return _pack([_sample([0], [0], [0.0] * len(self._reward_columns or REWARD_KEYS[:1]), 0)]).schema

    def read(self, iteration: int, rank: int, world_size: int) -> PackedBatch:
        """Tokenize this rank's share of an iteration.

        Args:
            iteration: One of ``iterations``.
            rank: This process.
            world_size: Number of processes.

        Returns:
            Samples by ascending ``sample_id``, on the CPU; may be empty.

        Raises:
            ValueError: A row that has no tokens.
        """
        files = dump_files(self.path)
        rows = [
            (place, row)
            for file in self._paths[iteration]
            for place, row in rows_of_file(file, on_cut=_said_before)
            if iteration_of(row, files.index(file), place) == iteration and not self._is_empty(row, place)
        ]
        size = self.rollouts_per_prompt(iteration)
        first_id = {group: index * size for index, group in enumerate(self._group_sizes[iteration])}
        taken: dict[str, int] = {}
        numbered = []
        for place, row in rows:
            group = group_of(row)
            numbered.append((first_id[group] + taken.get(group, 0), place, row))
            taken[group] = taken.get(group, 0) + 1
        numbered.sort(key=lambda entry: entry[0])
        own = [numbered[index] for index in contiguous_share(len(numbered), world_size, rank)]
        samples = [self._tokenize(row, place, sample_id) for sample_id, place, row in own]
        return _pack(samples) if samples else PackedBatch.empty(self.schema(iteration))

    def _check(self, row: Mapping[str, Any], place: str) -> None:
        try:
            if _ids_in(row, "prompt", place) is None or not _has_group(row):  # token ids need the name of their group instead
                as_conversation(_first(row, PROMPT_KEYS, "prompt"))
            if _ids_in(row, "completion", place) is None:
                completion_text(_first(row, COMPLETION_KEYS, "completion"))
        except LookupError as error:
            raise ValueError(f"{place}: {error.args[0]}") from None
        except ValueError as error:
            raise ValueError(str(error) if str(error).startswith(place) else f"{place}: {error}.") from None
        if not self._rewards_in(row):
            wanted = " or ".join(REWARD_KEYS) if self._reward_columns is None else " and ".join(self._reward_columns)
            raise ValueError(f"{place}: no reward under {wanted}; keys: {sorted(row)}. Name the columns in reward_columns.")
        self._rewards(row, place)

    def _is_empty(self, row: Mapping[str, Any], place: str) -> bool:
        """Return whether a row's completion has no tokens, as far as that shows without the tokenizer."""
        ids = _ids_in(row, "completion", place)
        return not (self._append_eos or completion_text(_first(row, COMPLETION_KEYS, "completion"))) if ids is None else not ids

    def _rewards_in(self, row: Mapping[str, Any]) -> list[str]:
        if self._reward_columns is not None:
            return list(self._reward_columns) if all(key in row for key in self._reward_columns) else []
        # verl's rows may hold a part of the score, or something else that a reward function told, under the other name
        keys = reversed(REWARD_KEYS) if "input" in row else REWARD_KEYS
        return [key for key in keys if key in row][:1]

    def _rewards(self, row: Mapping[str, Any], place: str) -> list[float]:
        values = [row[key] for key in self._rewards_in(row)]
        rewards = [math.nan if value is None else value for value in values]  # Python writes NaN itself into JSON: null it is
        if not all(isinstance(reward, int | float) and not math.isinf(reward) for reward in rewards):
            raise ValueError(f"{place}: expected a finite number or null as reward but got {values}.")
        return [float(reward) for reward in rewards]

    def _tokenize(self, row: Mapping[str, Any], place: str, sample_id: int) -> dict[str, torch.Tensor]:
        prompt, completion = _ids_in(row, "prompt", place), _ids_in(row, "completion", place)
        try:
            if prompt is None:
                prompt = encode_prompt(self._tokenizer, _first(row, PROMPT_KEYS, "prompt"))
            if completion is None:
                completion = encode_completion(self._tokenizer, _first(row, COMPLETION_KEYS, "completion"), append_eos=self._append_eos)
        except Exception as error:  # a tokenizer or its template may raise anything
            raise ValueError(f"{place} cannot be tokenized ({type(error).__name__}: {error}).") from error
        if not prompt or not completion:
            raise ValueError(f"{place}: the {'completion' if prompt else 'prompt'} has no tokens. Leave the row out.")
        return _sample(prompt, completion, self._rewards(row, place), sample_id)


def encode_prompt(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """Return the token ids of a prompt, with what the tokenizer puts in front of a text.

    Args:
        tokenizer: Of the policy.
        prompt: Text, or messages for the tokenizer's chat template.

    Raises:
        ValueError: It is neither.
    """
    messages = as_conversation(prompt)
    return list(tokenizer.encode(prompt)) if messages is None else encode_rendered(tokenizer, render(tokenizer, messages))


def encode_completion(tokenizer: Tokenizer, completion: Any, *, append_eos: bool) -> list[int]:
    """Return the token ids of a completion, with nothing in front of it.

    Args:
        tokenizer: Of the policy.
        completion: Text, or the one message of the assistant.
        append_eos: Whether the end token follows, if the tokenizer has one.

    Raises:
        ValueError: It is neither.
    """
    ids = encode_rendered(tokenizer, completion_text(completion))
    return [*ids, tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else ids


def _sample(prompt: list[int], completion: list[int], rewards: list[float], sample_id: int) -> dict[str, torch.Tensor]:
    verdicts = [reward for reward in rewards if not math.isnan(reward)]
    return {
        "input_ids": torch.tensor([*prompt, *completion], dtype=torch.int64),
        "response_mask": torch.tensor([False] * len(prompt) + [True] * len(completion)),
        "reward": torch.tensor(math.fsum(verdicts) if verdicts else math.nan, dtype=torch.float64),
        "component_rewards": torch.tensor(rewards, dtype=torch.float64),
        "truncated": torch.tensor(False),  # a dump does not tell
        SAMPLE_ID: torch.tensor(sample_id, dtype=torch.int64),
    }


def _pack(samples: Sequence[Mapping[str, torch.Tensor]]) -> PackedBatch:
    return PackedBatch.from_samples(samples, per_sample=("component_rewards",))


def _first(row: Mapping[str, Any], keys: Sequence[str], kind: str) -> Any:
    for key in keys:
        if key in row:
            return row[key]
    raise LookupError(f"expected the {kind} under {' or '.join(keys)} but got nothing; keys: {sorted(row)}.")


def _ids_in(row: Mapping[str, Any], kind: str, place: str) -> list[int] | None:
    ids = row.get(f"{kind}_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)):
        raise ValueError(f"{place}: expected {kind}_ids to be a list of token ids but got {repr(ids)[:80]}.")
    return ids


def group_of(row: Mapping[str, Any]) -> str:
    """Return what names the group of a row, as JSON: its ``group_id`` or ``uid``, else its prompt.

    Args:
        row: Of a dump.

    Raises:
        LookupError: It has none of these.

    Example:
        >>> group_of({"uid": "a_0_1", "input": "1 + 1 ="}), group_of({"prompt": "1 + 1 ="})
        ('"a"', '"1 + 1 ="')
    """
    if not _has_group(row):
        return json.dumps(_first(row, PROMPT_KEYS, "prompt"))
    name = next(row[key] for key in GROUP_KEYS if row.get(key) is not None)
    sample = _VERL_SAMPLE.fullmatch(name) if "input" in row and isinstance(name, str) else None
    return json.dumps(sample[1] if sample else name)


def _has_group(row: Mapping[str, Any]) -> bool:
    return any(row.get(key) is not None for key in GROUP_KEYS)


def iteration_of(row: Mapping[str, Any], number: int, place: str) -> int:
    """Return the iteration of a row.

    Args:
        row: Of a dump.
        number: Of its file: the iteration of rows that do not tell.
        place: Where it stands, for the error message.

    Raises:
        ValueError: The row's iteration is no integer.
    """
    given = next((row[key] for key in ITERATION_KEYS if row.get(key) is not None), number)
    try:
        return int(given)
    except (TypeError, ValueError):
        raise ValueError(f"{place}: expected {' or '.join(ITERATION_KEYS)} to be an integer but got {given!r}.") from None


def _said_before(text: str) -> None:
    """Say nothing: the file was read as a whole when the dump was opened."""


def dump_files(path: Path) -> list[Path]:
    """Return the file, or those in the folder with numbers in their natural order (2 before 10).

    Args:
        path: A file, or a folder that is searched for ``.jsonl`` and ``.parquet`` files.

    Raises:
        ValueError: There are none.
    """
    if path.is_file():
        return [path]
    found = [file for file in path.rglob("*") if file.suffix in (".jsonl", ".parquet") and file.is_file()]
    if not found:
        raise ValueError(f"{path} is neither a .jsonl or .parquet file nor a folder with such files.")
    return sorted(found, key=natural_order)
