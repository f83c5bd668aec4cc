"""Rollout engines that write completions to a file and that serve them from one."""

import json
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlbatch.rollout.engine import (
    Completion,
    FinishReason,
    ProgressCallback,
    RolloutEngine,
    RolloutRequest,
    SamplingParams,
    WeightStream,
)
from lightning_rlbatch.rollout.engine_output import checked_completions
from lightning_rlbatch.rollout.recorded_files import recorded_files, turns_of_recording
from lightning_rlbatch.rollout.row_files import completion_text, rows_of_file


@dataclass(frozen=True)
class RecordedCompletion:
    """A completion with the prompt it answers.

    Attributes:
        prompt_ids: Token ids of the prompt.
        completion: What was sampled.
        seed: Seed of the request it was sampled for; None if unknown.
    """

    prompt_ids: tuple[int, ...]
    completion: Completion
    seed: int | None = None


class ReplayEngine:
    """Serve recorded completions instead of sampling: to debug a trainer without generation, or to train off-line.

    A request is served what was recorded for its prompt and seed. If both were recorded more often (every validation draws the same
    random numbers), the same request is served them in their order, and the first one again after the last. If that seed was not
    recorded (text dumps know no seeds), the seed picks one of the prompt's completions, the same on any rank and world size. Limits of
    the request hold: a completion is cut behind the first stop token and at ``max_new_tokens``, as if it had been sampled under them.
    Temperature, ``top_k`` and ``top_p`` have no effect, nor have the policy's weights.

    Args:
        records: The completions.

    Raises:
        ValueError: If there are none.
    """

    def __init__(self, records: Iterable[RecordedCompletion]) -> None:
        self._of_prompt: dict[tuple[int, ...], list[Completion]] = {}
        self._of_seed: dict[tuple[tuple[int, ...], int], deque[Completion]] = {}  # what comes next is on the left
        self._asleep = False
        for record in records:
            self._of_prompt.setdefault(record.prompt_ids, []).append(record.completion)
            if record.seed is not None:
                self._of_seed.setdefault((record.prompt_ids, record.seed), deque()).append(record.completion)
        if not self._of_prompt:
            raise ValueError("ReplayEngine needs recorded completions but got none.")

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, encode: Callable[[Any], Sequence[int]] | None = None, eos_token_id: int | None = None
    ) -> "ReplayEngine":
        """Read recorded completions.

        A file has one object per completion, as JSON lines or Parquet: rows of :class:`RecordingEngine`, rows of a generator of your own
        with ``prompt_ids`` and ``completion_ids``, or texts as verl (``input``, ``output``) and TRL (``prompt``, ``completion``) dump
        them. Texts are tokenized again, and their log-probs are NaN: let the trainer compute old log-probs, and correct for no mismatch.
        A last line that breaks off is left out with a warning. What ``RolloutRecorder`` wrote is read too, and served to the requests of
        the run that was recorded, turn by turn; of prompts that a resumed run sampled again, the last completions.

        Args:
            path: The file, or a folder of such files.
            encode: Needed for texts: turns a text into token ids, without special tokens around it, such as the tokenizer's ``encode``;
                and the messages of a conversation, if prompts are conversations.
            eos_token_id: Appended to the completions of texts, which leave it out.

        Raises:
            FileNotFoundError: There is nothing of this name.
            ValueError: If a row is neither of these; the message names its line.
        """
        return cls(_records(recorded_files(Path(path)), encode, eos_token_id))

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None = None
    ) -> list[Completion]:
        """Return the recorded completion of each request.

        Args:
            requests: Prompts and seeds.
            sampling: ``max_new_tokens`` and ``stop_token_ids`` are in effect.
            on_progress: Called once per completion.

        Raises:
            ValueError: If a prompt is empty or was not recorded.
            RuntimeError: If the engine sleeps.
        """
        if self._asleep:
            raise RuntimeError("The engine sleeps and cannot generate. Call wake() first.")
        completions = []
        for index, request in enumerate(requests):
            if not request.prompt_ids:
                raise ValueError(f"Prompt {index} is empty but a prompt needs at least one token.")
            completion = _cut(self._find(index, request), sampling, request.limit(sampling))
            if on_progress is not None:
                on_progress(1, len(completion.token_ids))
            completions.append(completion)
        return completions

    def _find(self, index: int, request: RolloutRequest) -> Completion:
        prompt = tuple(request.prompt_ids)
        recorded = self._of_prompt.get(prompt)
        if recorded is None:
            raise ValueError(
                f"Prompt {index} ({len(prompt)} tokens, beginning with {list(prompt[:8])}) was not recorded; there are completions of "
                f"{len(self._of_prompt)} other prompts. Replay with the prompts and the tokenizer of the recorded run."
            )
        in_turn = self._of_seed.get((prompt, request.seed))
        if in_turn is None:
            return recorded[request.seed % len(recorded)]
        in_turn.rotate(-1)
        return in_turn[-1]

    def update_weights(self, weights: WeightStream) -> None:
        """Consume the weights without effect."""
        for _ in weights:
            pass

    def sleep(self) -> None:
        """Refuse to generate until :meth:`wake`."""
        self._asleep = True

    def wake(self) -> None:
        """Serve again."""
        self._asleep = False


class RecordingEngine:
    """Pass everything on to another engine, and append what it samples to a file for :class:`ReplayEngine`.

    Args:
        engine: What samples.
        path: JSONL file; rows are appended after every :meth:`generate`. Each rank needs a file of its own, and each run: what is in the
            file already is served before what is appended.
    """

    def __init__(self, engine: RolloutEngine, path: str | os.PathLike[str]) -> None:
        self.engine = engine
        self.path = Path(path)

    @property
    def merges_adapters(self) -> bool:
        """Whether the other engine wants weights under the names of the plain model."""
        return getattr(self.engine, "merges_adapters", False)

    def generate(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, on_progress: ProgressCallback | None = None
    ) -> list[Completion]:
        """Sample with the other engine, and append prompts, seeds and completions to the file.

        Raises:
            TypeError: See :func:`checked_completions`, as for the following ones.
            ValueError: A completion that is none.
            RuntimeError: The engine returned another number of completions than it got requests.
        """
        completions = checked_completions(self.engine, self.engine.generate(requests, sampling, on_progress), len(requests))
        rows = [
            {
                "prompt_ids": list(request.prompt_ids),
                "seed": request.seed,
                "token_ids": completion.token_ids,
                "log_probs": [None if math.isnan(value) else value for value in completion.log_probs],
                "finish_reason": completion.finish_reason,
            }
            for request, completion in zip(requests, completions)
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return completions

    def update_weights(self, weights: WeightStream) -> None:
        """Pass the weights on."""
        self.engine.update_weights(weights)

    def sleep(self) -> None:
        """Let the other engine sleep."""
        self.engine.sleep()

    def wake(self) -> None:
        """Wake the other engine."""
        self.engine.wake()


def _cut(completion: Completion, sampling: SamplingParams, limit: int) -> Completion:
    """End a completion where the given limits would have ended it."""
    for length, token in enumerate(completion.token_ids[:limit], start=1):
        if token in sampling.stop_token_ids:
            return Completion(completion.token_ids[:length], completion.log_probs[:length], "stop")
    if len(completion.token_ids) > limit:
        return Completion(completion.token_ids[:limit], completion.log_probs[:limit], "length")
    return completion


def _records(files: Sequence[Path], encode: Callable[[Any], Sequence[int]] | None, eos: int | None) -> Iterator[RecordedCompletion]:
    of_recorder: dict[tuple[tuple[int, ...], int], RecordedCompletion] = {}  # later parts of an iteration replace earlier ones
    for file in files:
        if file.suffix == ".safetensors":
            of_recorder |= {(turn[0], turn[2]): RecordedCompletion(*turn) for turn in turns_of_recording(file)}
        else:
            yield from (_record(row, place, encode, eos) for place, row in rows_of_file(file, on_cut=warnings.warn))
    yield from of_recorder.values()


def _record(row: Mapping[str, Any], place: str, encode: Callable[[Any], Sequence[int]] | None, eos: int | None) -> RecordedCompletion:
    try:
        return _read(row, encode, eos)
    except ValueError as error:
        raise ValueError(f"{place}: {error}.") from None


def _read(row: Mapping[str, Any], encode: Callable[[Any], Sequence[int]] | None, eos: int | None) -> RecordedCompletion:
    name = "completion_ids" if "completion_ids" in row else "token_ids"
    if {"prompt_ids", name} <= row.keys():
        tokens, given = _token_ids(row, name), row.get("log_probs")
        log_probs = [math.nan] * len(tokens) if given is None else [math.nan if value is None else float(value) for value in given]
        if len(log_probs) != len(tokens):
            raise ValueError(f"{len(tokens)} {name} need as many log_probs but there are {len(log_probs)}")
        reason: FinishReason = "length" if row.get("finish_reason") == "length" else "stop"
        return RecordedCompletion(tuple(_token_ids(row, "prompt_ids")), Completion(tokens, log_probs, reason), row.get("seed"))
    for prompt, completion in (("prompt", "completion"), ("input", "output")):
        if prompt in row and completion in row:
            if encode is None:
                raise ValueError("the row holds text; pass encode=tokenizer.encode so that it can be turned into token ids")
            tokens = [*encode(completion_text(row[completion])), *([] if eos is None else [eos])]
            return RecordedCompletion(tuple(encode(row[prompt])), Completion(tokens, [math.nan] * len(tokens), "stop"))
    raise ValueError(f"expected prompt_ids and token_ids, prompt and completion, or input and output, but got {sorted(row)}")


def _token_ids(row: Mapping[str, Any], name: str) -> list[int]:
    ids = row[name]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"expected {name} to be a list of token ids but got {repr(ids)[:80]}")
    return ids
