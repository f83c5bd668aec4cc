"""Tower of Hanoi as a language: puzzles of reasoning-gym, one token per move, judged by reasoning-gym's own verifier.

With three pegs and 2 to 6 disks there are 30 puzzles: 5 numbers of disks x 6 pairs of start and target peg. Five of them, one for each
number of disks (:data:`HELD_OUT`), are held out from reinforcement learning: no rollout of theirs is ever sampled for training or
rewarded. Imperfect demonstrations of ALL 30 are part of the warm-up (a policy that has never read a prompt cannot guess its
convention), so that the accuracy on held-out puzzles measures whether what RL teaches on 25 puzzles (to stop making the demonstrators'
mistakes) carries over to puzzles on which it gave no feedback.
"""

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DISKS = range(2, 7)
PEGS = (1, 2, 3)
MOVES = tuple(f"{source}{target}" for source, target in itertools.permutations(PEGS, 2))

HELD_OUT = frozenset({"212>", "323>", "431>", "513>", "621>"})
"""Prompts held out from reinforcement learning: for each number of disks another pair of start and target peg."""

_VOCABULARY = ("<pad>", "<eos>", ">", "1", "2", "3", "4", "5", "6", *MOVES)


class HanoiTokenizer:
    """Turn puzzles and moves into token ids and back.

    A prompt such as ``521>`` (5 disks, from peg 2 to peg 1) is a token per character; an answer such as ``21 23 13`` is a token per
    move (from peg 2 to peg 1, ...) and, in token ids, ends with ``eos_token_id``.

    Example:
        >>> HanoiTokenizer().encode("212>23 21 31")
        [4, 3, 4, 2, 12, 11, 13]
        >>> HanoiTokenizer().decode([12, 11, 13, 1, 0])
        '23 21 31'
    """

    pad_token_id = 0
    eos_token_id = 1
    vocab_size = len(_VOCABULARY)

    def __len__(self) -> int:
        """Return the size of the vocabulary."""
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt, of moves separated by spaces, or of a prompt and its moves.

        Raises:
            ValueError: If the text holds something else.
        """
        prompt, arrow, moves = text.rpartition(">")
        try:
            return [_VOCABULARY.index(token) for token in [*prompt, *arrow, *moves.split()]]
        except ValueError:
            raise ValueError(f"Expected a prompt such as '521>' and moves out of {', '.join(MOVES)} but got {text!r}.") from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; padding and the end token are left out unless ``skip_special_tokens`` is False."""
        tokens = [_VOCABULARY[int(token)] for token in token_ids if not (skip_special_tokens and int(token) <= self.eos_token_id)]
        num_prompt = tokens.index(">") + 1 if ">" in tokens else 0
        return "".join(tokens[:num_prompt]) + " ".join(tokens[num_prompt:])

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of several sequences."""
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]


@dataclass(frozen=True)
class Puzzle:
    """One Tower of Hanoi.

    Attributes:
        num_disks: Number of disks.
        start: Peg, 1 to 3, on which all disks lie.
        target: The peg to which they shall move.
        solution: The optimal moves, ``2**num_disks - 1`` of them.
    """

    num_disks: int
    start: int
    target: int
    solution: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """The puzzle as the policy reads it."""
        return f"{self.num_disks}{self.start}{self.target}>"


@functools.cache
def _gym() -> tuple[Any, dict[str, dict[str, Any]]]:
    """Return reasoning-gym's data set, which is also the verifier, and its entry for each of the 30 prompts."""
    # here and not above: the package imports a hundred data sets, which takes a second
    from reasoning_gym.games.tower_of_hanoi import HanoiConfig, HanoiDataset

    # puzzles are drawn at random; among 1000 draws each of the 30 occurs
    dataset = HanoiDataset(HanoiConfig(min_disks=DISKS[0], max_disks=DISKS[-1], min_pegs=3, max_pegs=3, seed=0, size=1000))
    entries: dict[str, dict[str, Any]] = {}
    for entry in dataset:
        metadata = entry["metadata"]
        entries.setdefault(f"{metadata['num_disks']}{metadata['start_peg']}{metadata['target_peg']}>", entry)
    return dataset, dict(sorted(entries.items()))


@functools.cache
def puzzles() -> tuple[Puzzle, ...]:
    """Return all 30 puzzles with reasoning-gym's answers, ordered by prompt."""
    found = []
    for entry in _gym()[1].values():
        words = [line.split() for line in entry["answer"].splitlines()]  # of 'Move disk 1 from Peg 2 to Peg 3'
        metadata = entry["metadata"]
        solution = tuple(word[5] + word[8] for word in words)
        found.append(Puzzle(metadata["num_disks"], metadata["start_peg"], metadata["target_peg"], solution))
    return tuple(found)


def train_prompts() -> list[dict[str, Any]]:
    """Return the 25 prompts of reinforcement learning: rows with ``prompt`` and the column ``num_disks``."""
    return [{"prompt": puzzle.prompt, "num_disks": puzzle.num_disks} for puzzle in puzzles() if puzzle.prompt not in HELD_OUT]


def held_out_prompts() -> list[dict[str, Any]]:
    """Return the 5 prompts that are held out from reinforcement learning, as :func:`train_prompts` does."""
    return [{"prompt": puzzle.prompt, "num_disks": puzzle.num_disks} for puzzle in puzzles() if puzzle.prompt in HELD_OUT]


def _as_answer(prompt: str, completion: str) -> str:
    """Write moves the way the verifier reads them, which names the disk that moves (0, which is no disk, from an empty peg)."""
    pegs: dict[str, list[int]] = {str(peg): [] for peg in PEGS}
    pegs[prompt[1]] = list(range(int(prompt[0]), 0, -1))
    lines = []
    for move in completion.split():
        if move not in MOVES:
            return f"{move} is no move"
        source, target = move[0], move[1]
        disk = pegs[source].pop() if pegs[source] else 0
        pegs[target].append(disk)
        lines.append(f"Move disk {disk} from Peg {source} to Peg {target}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=65536)
def is_solved(prompt: str, completion: str) -> bool:
    """Return whether reasoning-gym's verifier gives its full score: legal moves that reach the target in the fewest moves.

    Its partial credit for legal moves that solve nothing is not used: a policy learns to stop early in order to collect it.

    Args:
        prompt: Such as ``521>``.
        completion: Moves separated by spaces.

    Raises:
        ValueError: If the prompt is none of the 30 puzzles.

    Example:
        >>> is_solved("212>", "13 12 32"), is_solved("212>", "13 12"), is_solved("212>", "13 13 12")
        (True, False, False)
    """
    verifier, entries = _gym()
    if prompt not in entries:
        raise ValueError(f"Expected a puzzle such as '521>' (2 to 6 disks, from one of 3 pegs to another) but got {prompt!r}.")
    return bool(verifier.score_answer(_as_answer(prompt, completion), entries[prompt]) >= 1.0)


def hanoi_reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward 1 for a solved puzzle and 0 for anything else.

    Args:
        prompts: Prompt texts.
        completions: Completion texts, without special tokens.
        **columns: Further columns of the data set; not used.
    """
    return [float(is_solved(prompt, completion)) for prompt, completion in zip(prompts, completions)]


class HanoiDemonstrations(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Demonstrations by an imperfect teacher: optimal answers with random moves mixed in.

    Every number of disks occurs equally often, so that short and long answers do.

    Args:
        size: Number of demonstrations.
        noise: Share of the moves that are replaced by one of the six moves at random.
        seed: Of the choice of puzzles and of the noise.

    Example:
        >>> sample = HanoiDemonstrations(size=4)[3]
        >>> sorted(sample), int(sample["input_ids"][-1]), sample["response_mask"][:5].tolist()
        (['input_ids', 'response_mask'], 1, [False, False, False, False, True])
    """

    def __init__(self, size: int = 16000, noise: float = 0.04, seed: int = 0) -> None:
        if size < 1 or not 0 <= noise <= 1:
            raise ValueError(f"Expected size of at least 1 and noise between 0 and 1 but got size={size} and noise={noise}.")
        self.size = size
        self.noise = noise
        self.seed = seed

    def __len__(self) -> int:
        """Return the number of demonstrations."""
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` ``[L]`` int64 and ``response_mask`` ``[L]`` bool; the same for the same index on every rank."""
        if not 0 <= index < self.size:
            raise IndexError(f"Demonstration {index} of {self.size}.")
        rng = random.Random(f"{self.seed}/{index}")
        puzzle = rng.choice(puzzles())
        moves = [rng.choice(MOVES) if rng.random() < self.noise else move for move in puzzle.solution]
        tokenizer = HanoiTokenizer()
        prompt = tokenizer.encode(puzzle.prompt)
        input_ids = torch.tensor([*prompt, *tokenizer.encode(" ".join(moves)), tokenizer.eos_token_id])
        return {"input_ids": input_ids, "response_mask": torch.arange(len(input_ids)) >= len(prompt)}
