"""The prompts of one RL iteration, as every rank holds them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from lightning_rlbatch.data.chat import Conversation
from lightning_rlbatch.rollout.dispatch import contiguous_share as contiguous_share  # for those that share prompts out
from lightning_rlbatch.rollout.engine import rollout_seed


@runtime_checkable
class Tokenizer(Protocol):
    """What this package needs of a tokenizer; every transformers tokenizer has it."""

    @property
    def eos_token_id(self) -> int | None:
        """Token that ends a completion."""

    @property
    def pad_token_id(self) -> int | None:
        """Token that fills rectangles."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""


@dataclasses.dataclass(eq=False, repr=False)
class PromptBatch:
    """Prompts of one iteration or validation pass over ALL ranks; each is answered ``rollouts_per_prompt`` times.

    Attributes:
        prompts: Texts; of a conversation what the chat template makes of it.
        prompt_ids: Token ids of each prompt.
        columns: The other columns of each prompt's row, handed to reward functions.
        positions: Index of each prompt within its iteration: with ``seed`` and iteration it identifies a rollout's random
            numbers, so that rolling out a part of an iteration again (after a resume) repeats nothing and skips nothing.
        rollouts_per_prompt: Group size.
        max_response_length: Most tokens of one response.
        tokenizer: Decodes completions for reward functions.
        seed: Seed of the run.
        pool: The whole data set, for prompts that replace others.
        conversations: Messages of each prompt that was given as messages, None for one that was given as text; None if all were texts.
        prompt_epoch: Passes over the data set before this batch, fractions included.
    """

    prompts: list[str]
    prompt_ids: list[list[int]]
    columns: list[dict[str, Any]]
    positions: list[int]
    rollouts_per_prompt: int
    max_response_length: int
    tokenizer: Tokenizer
    seed: int
    pool: "PromptBatch | None" = None
    conversations: list[Conversation | None] | None = None
    prompt_epoch: float = 0.0

    def __repr__(self) -> str:
        return f"PromptBatch({len(self)} prompts x {self.rollouts_per_prompt} rollouts)"

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)

    @property
    def num_samples(self) -> int:
        """Number of rollouts over all ranks."""
        return len(self) * self.rollouts_per_prompt

    def conversation(self, index: int) -> Conversation | None:
        """Return the messages of a prompt; None if it is a text."""
        return None if self.conversations is None else self.conversations[index]

    def select(self, indices: Sequence[int]) -> "PromptBatch":
        """Return some of the prompts, in the given order."""
        return dataclasses.replace(
            self,
            prompts=[self.prompts[i] for i in indices],
            prompt_ids=[self.prompt_ids[i] for i in indices],
            columns=[self.columns[i] for i in indices],
            positions=[self.positions[i] for i in indices],
            conversations=None if self.conversations is None else [self.conversations[i] for i in indices],
        )

    def replaced(self, indices: Sequence[int], stream: int, attempt: int) -> "PromptBatch":
        """Return a batch in which some prompts are exchanged for others of the data set, by a rule that every rank computes alike.

        Positions stay, so that random numbers and group ids belong to the place and not to the prompt.

        Args:
            indices: Which prompts go.
            stream: Number of the iteration.
            attempt: How often prompts were exchanged in it.
        """
        pool = self if self.pool is None else self.pool
        chosen = {index: rollout_seed(self.seed, stream, self.positions[index], -attempt) % len(pool) for index in indices}
        sources = [(pool, chosen[index]) if index in chosen else (self, index) for index in range(len(self))]
        conversations = [batch.conversation(index) for batch, index in sources]
        return dataclasses.replace(
            self,
            prompts=[batch.prompts[index] for batch, index in sources],
            prompt_ids=[batch.prompt_ids[index] for batch, index in sources],
            columns=[batch.columns[index] for batch, index in sources],
            conversations=conversations if any(conversations) else None,
        )
