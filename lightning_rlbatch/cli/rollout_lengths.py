"""Read the lengths of a run's rollouts, and deal them to the mini-batches that the run would have made."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlbatch.data.batching import mini_batch_members
from lightning_rlbatch.data.dumps import COMPLETION_KEYS, PROMPT_KEYS, dump_files, encode_completion, encode_prompt, group_of, iteration_of
from lightning_rlbatch.data.prompts import Tokenizer
from lightning_rlbatch.data.recording import RecordedRollouts
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.rollout.row_files import rows_of_file

TokenizerMaker = Callable[[], Tokenizer]
"""Makes the tokenizer when the first text is to be counted; the same one every time."""


@dataclass(frozen=True)
class IterationLengths:
    """The rollouts of one iteration that can be trained on.

    Attributes:
        number: Of the iteration.
        groups: Position of a prompt in its iteration -> tokens (prompt and response) of its rollouts, in the order of their ids.
        num_prompts: Prompts of the iteration, those without a rollout to train on included.
        seed: Of the run; None if the files do not tell.
    """

    number: int
    groups: dict[int, list[int]]
    num_prompts: int
    seed: int | None

    def mini_batches(self, size: int | None, *, ppo_epochs: int = 1, seed: int | None = None) -> list[list[int]]:
        """Return the lengths of each optimizer step's samples, in the order in which the run plans them; empty ones are left out.

        Args:
            size: Prompts per optimizer step; None takes the whole iteration.
            ppo_epochs: Passes over the rollouts.
            seed: Seed of membership; None takes the recorded one, else 0.
        """
        known = self.seed if seed is None else seed
        steps = [
            [length for prompt in part for length in self.groups.get(prompt, [])]
            for epoch in range(ppo_epochs)
            for part in mini_batch_members(self.num_prompts, size or self.num_prompts, seed=known or 0, iteration=self.number, epoch=epoch)
        ]
        return [lengths for lengths in steps if lengths]


def read_iterations(path: str, tokenizer: TokenizerMaker | None = None) -> list[IterationLengths]:
    """Read every iteration of a folder of rollouts.

    Args:
        path: What :class:`RolloutRecorder` wrote, or JSON lines or Parquet files: of :class:`RolloutLogger`, or another
            trainer's dump.
        tokenizer: Of the policy; needed for rows that do not count the tokens of prompt and response themselves.

    Raises:
        ValueError: There are no rollouts, or a line's tokens cannot be counted; the message says where and what to do.
    """
    folder = Path(path)
    if any(folder.glob("iteration_*/*.safetensors")):
        return _recorded(folder)
    try:
        files = dump_files(folder)
    except ValueError:
        raise ValueError(
            f"{path} has no rollouts: expected iteration_000000/rank_00000.safetensors of RolloutRecorder, or .jsonl or"
            " .parquet files of RolloutLogger or another trainer."
        ) from None
    return _dumped(files, tokenizer)


def _recorded(folder: Path) -> list[IterationLengths]:
    recording = RecordedRollouts(folder)
    found = []
    for number in recording.iterations:
        samples, size = recording.read(number, 0, 1), recording.rollouts_per_prompt(number)
        groups: dict[int, list[int]] = {}
        for sample_id, length in zip(samples[SAMPLE_ID].tolist(), samples.seq_lens):
            groups.setdefault(sample_id // size, []).append(length)
        found.append(IterationLengths(number, groups, recording.num_prompts, recording.seed(number)))
    return found


def _dumped(files: list[Path], tokenizer: TokenizerMaker | None) -> list[IterationLengths]:
    rows: dict[int, dict[str, list[tuple[int, int]]]] = {}
    largest: dict[int, int] = {}
    for number, file in enumerate(files):
        for place, row in rows_of_file(file, on_cut=warnings.warn):
            try:
                group = group_of(row)
            except LookupError as error:
                raise ValueError(f"{place}: {error.args[0]}") from None
            iteration, sample_id = iteration_of(row, number, place), row.get("sample_id")
            members = rows.setdefault(iteration, {}).setdefault(group, [])
            if not isinstance(sample_id, int):
                sample_id = len(members)
            elif sample_id > largest.get(iteration, -1):
                largest[iteration] = sample_id
            reward = row.get("reward", row.get("score", 0.0))
            if reward is not None and reward == reward:  # rollouts without a verdict (null, NaN) are not trained on
                members.append((sample_id, count_tokens(row, place, tokenizer)))
    found = []
    for number in sorted(rows):
        # RolloutLogger's groups are positions in the iteration, none above its samples' ids; those of others are numbered as they come.
        are_positions = all(group.isdigit() and int(group) <= largest.get(number, -1) for group in rows[number])
        groups = {
            (int(group) if are_positions else index): [length for _, length in sorted(members)]
            for index, (group, members) in enumerate(rows[number].items())
        }
        found.append(IterationLengths(number, groups, max(groups) + 1, None))
    return found


def count_tokens(row: Mapping[str, Any], place: str, tokenizer: TokenizerMaker | None) -> int:
    """Return the tokens of a rollout's prompt and response.

    Args:
        row: With ``num_prompt_tokens`` or ``prompt_ids``, ``num_response_tokens`` or ``completion_ids``; else texts.
        place: Where it stands, for the error message.
        tokenizer: Of the policy; the end token is added to a completion, as :class:`RolloutDump` does.

    Raises:
        ValueError: A part can only be counted with a tokenizer, cannot be tokenized, or is not there.
    """
    total = 0
    for kind, count, keys in (("prompt", "num_prompt_tokens", PROMPT_KEYS), ("completion", "num_response_tokens", COMPLETION_KEYS)):
        text = next((row[key] for key in keys if row.get(key) is not None), None)
        if isinstance(row.get(count), int):
            total += row[count]
        elif isinstance(row.get(f"{kind}_ids"), list):
            total += len(row[f"{kind}_ids"])
        elif text is None:
            raise ValueError(f"{place} has no {kind}: expected {count}, {kind}_ids, or text under {' or '.join(keys)}.")
        elif tokenizer is None:
            raise ValueError(f"{place} has the {kind} as text: pass --tokenizer (a folder or an import path) to count its tokens.")
        else:
            total += len(_encode(tokenizer(), kind, text, place))
    return total


def _encode(tokenizer: Tokenizer, kind: str, text: Any, place: str) -> list[int]:
    try:
        return encode_prompt(tokenizer, text) if kind == "prompt" else encode_completion(tokenizer, text, append_eos=True)
    except Exception as error:  # a tokenizer or its template may raise anything
        raise ValueError(f"{place} cannot be tokenized ({type(error).__name__}: {error}).") from error
