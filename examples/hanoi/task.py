"""Tower of Hanoi as a language: puzzles of reasoning-gym, one token per move, judged by reasoning-gym's own verifier.

With three pegs and 2 to 6 disks there are 30 puzzles: 5 numbers of disks x 6 pairs of start and target peg. A puzzle can be worded in
four ways; 5 disks from peg B to peg A read ``5:B>A=``, ``5:A<B=``, ``B>A:5=`` or ``A<B:5=``. That gives 120 prompts.

What is held out: one wording of every puzzle, 30 prompts in all, spread evenly over the four wordings. They are never part of a
demonstration, never rolled out for training and never rewarded. The policy has met each of these puzzles in its three other wordings,
and each wording with other puzzles, so that held-out accuracy measures whether it reads a prompt it has never seen and then solves it
to the last move; it does not measure whether it could solve a puzzle that it has met in no wording at all.
"""

import functools
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

DISKS = range(2, 7)
PEGS = "ABC"  # reasoning-gym's pegs 1, 2 and 3
MOVES = tuple(source + target for source, target in itertools.permutations(PEGS, 2))

_VOCABULARY = ("<pad>", "<eos>", "=", ">", "<", ":", *map(str, DISKS), *PEGS, *MOVES)
_NUM_WORDINGS = 4


class HanoiTokenizer:
    """Turn puzzles and moves into token ids and back.

    A prompt such as ``5:B>A=`` (5 disks, from peg B to peg A) is a token per character; an answer such as ``BC BA CA`` is a token per
    move (from peg B to peg C, ...) and, in token ids, ends with ``eos_token_id``.

    Example:
        >>> HanoiTokenizer().encode("2:B>A=BC BA CA")
        [6, 5, 12, 3, 11, 2, 17, 16, 18]
        >>> HanoiTokenizer().decode([17, 16, 18, 1, 0])
        'BC BA CA'
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
        prompt, arrow, moves = text.rpartition("=")
        try:
            return [_VOCABULARY.index(token) for token in [*prompt, *arrow, *moves.split()]]
        except ValueError:
            raise ValueError(f"Expected a prompt such as '5:B>A=' and moves out of {', '.join(MOVES)} but got {text!r}.") from None

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; padding and the end token are left out unless ``skip_special_tokens`` is False."""
        tokens = [_VOCABULARY[int(token)] for token in token_ids if not (skip_special_tokens and int(token) <= self.eos_token_id)]
        num_prompt = tokens.index("=") + 1 if "=" in tokens else 0
        return "".join(tokens[:num_prompt]) + " ".join(tokens[num_prompt:])

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = True) -> list[str]:
        """Return the text of several sequences."""
        return [self.decode(sequence, skip_special_tokens) for sequence in sequences]


@dataclass(frozen=True)
class Puzzle:
    """One Tower of Hanoi.

    Attributes:
        num_disks: Number of disks.
        start: Peg on which all disks lie.
        target: Peg to which they shall move.
        solution: The optimal moves, ``2**num_disks - 1`` of them.
        entry: reasoning-gym's form of the puzzle.
    """

    num_disks: int
    start: str
    target: str
    solution: tuple[str, ...]
    entry: dict[str, Any]

    @property
    def wordings(self) -> tuple[str, ...]:
        """The four prompts that ask for this puzzle."""
        forth, back = f"{self.start}>{self.target}", f"{self.target}<{self.start}"
        return f"{self.num_disks}:{forth}=", f"{self.num_disks}:{back}=", f"{forth}:{self.num_disks}=", f"{back}:{self.num_disks}="

    @property
    def held_out_wording(self) -> int:
        """Index of the wording that is held out: another one from puzzle to puzzle."""
        return (self.num_disks + MOVES.index(self.start + self.target)) % _NUM_WORDINGS


@functools.cache
def _verifier() -> Any:
    """Return reasoning-gym's data set of these puzzles, which also judges answers."""
    # here and not above: the package imports a hundred data sets, which takes a second
    from reasoning_gym.games.tower_of_hanoi import HanoiConfig, HanoiDataset

    # it draws puzzles at random; among 1000 draws each of the 30 occurs
    return HanoiDataset(HanoiConfig(min_disks=DISKS[0], max_disks=DISKS[-1], min_pegs=3, max_pegs=3, seed=0, size=1000))


@functools.cache
def puzzles() -> tuple[Puzzle, ...]:
    """Return all 30 puzzles with reasoning-gym's answers, ordered by disks, start and target."""
    found: dict[tuple[int, str, str], Puzzle] = {}
    for entry in _verifier():
        metadata = entry["metadata"]
        key = (metadata["num_disks"], PEGS[metadata["start_peg"] - 1], PEGS[metadata["target_peg"] - 1])
        if key not in found:
            words = [line.split() for line in entry["answer"].splitlines()]  # of 'Move disk 1 from Peg 2 to Peg 3'
            solution = tuple(PEGS[int(word[5]) - 1] + PEGS[int(word[8]) - 1] for word in words)
            found[key] = Puzzle(*key, solution, entry)
    return tuple(puzzle for _, puzzle in sorted(found.items()))


@functools.cache
def _puzzle_of() -> dict[str, Puzzle]:
    return {prompt: puzzle for puzzle in puzzles() for prompt in puzzle.wordings}


def _rows(held_out: bool) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "num_disks": puzzle.num_disks}
        for puzzle in puzzles()
        for wording, prompt in enumerate(puzzle.wordings)
        if (wording == puzzle.held_out_wording) == held_out
    ]


def train_prompts() -> list[dict[str, Any]]:
    """Return the 90 prompts of training, demonstrations and RL alike: rows with ``prompt`` and the column ``num_disks``."""
    return _rows(held_out=False)


def held_out_prompts() -> list[dict[str, Any]]:
    """Return the 30 held-out prompts, one wording of every puzzle, as :func:`train_prompts` does."""
    return _rows(held_out=True)


def _as_answer(puzzle: Puzzle, completion: str) -> str:
    """Write moves the way the verifier reads them, which names the disk that moves (0, which is no disk, from an empty peg)."""
    disks: dict[str, list[int]] = {peg: [] for peg in PEGS}
    disks[puzzle.start] = list(range(puzzle.num_disks, 0, -1))
    lines = []
    for move in completion.split():
        if move not in MOVES:
            return f"{move} is no move"
        source, target = move[0], move[1]
        disk = disks[source].pop() if disks[source] else 0
        disks[target].append(disk)
        lines.append(f"Move disk {disk} from Peg {PEGS.index(source) + 1} to Peg {PEGS.index(target) + 1}")
    return "\n".join(lines)


@functools.lru_cache(maxsize=65536)
def is_solved(prompt: str, completion: str) -> bool:
    """Return whether reasoning-gym's verifier gives its full score: legal moves that reach the target in the fewest moves.

    Its partial credit for legal moves that solve nothing is not used: a policy learns to stop early in order to collect it.

    Args:
        prompt: Such as ``5:B>A=``.
        completion: Moves separated by spaces.

    Raises:
        ValueError: If the prompt is none of the 120 wordings.

    Example:
        >>> is_solved("2:A>B=", "AC AB CB"), is_solved("2:A>B=", "AC AB"), is_solved("2:A>B=", "AC AC AB")
        (True, False, False)
    """
    puzzle = _puzzle_of().get(prompt)
    if puzzle is None:
        raise ValueError(f"Expected a puzzle such as '5:B>A=' (2 to 6 disks, from one of the pegs A, B, C to another) but got {prompt!r}.")
    return bool(_verifier().score_answer(_as_answer(puzzle, completion), puzzle.entry) >= 1.0)


def hanoi_reward(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Reward 1 for a solved puzzle and 0 for anything else.

    Args:
        prompts: Prompt texts.
        completions: Completion texts, without special tokens.
        **columns: Further columns of the data set; not used.
    """
    return [float(is_solved(prompt, completion)) for prompt, completion in zip(prompts, completions)]


class HanoiDemonstrations(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Demonstrations by an imperfect teacher: optimal answers to training prompts with random moves mixed in.

    Every number of disks occurs equally often, so that an answer of 3 moves is as frequent as one of 63.

    Args:
        size: Number of demonstrations.
        noise: Share of the moves that are replaced by one of the six moves at random.
        seed: Of the choice of prompts and of the noise.

    Example:
        >>> sample = HanoiDemonstrations(size=4)[3]
        >>> sorted(sample), int(sample["input_ids"][-1]), sample["response_mask"][:7].tolist()
        (['input_ids', 'response_mask'], 1, [False, False, False, False, False, False, True])
    """

    def __init__(self, size: int = 32000, noise: float = 0.04, seed: int = 0) -> None:
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
        text = rng.choice([prompt for wording, prompt in enumerate(puzzle.wordings) if wording != puzzle.held_out_wording])
        moves = [rng.choice(MOVES) if rng.random() < self.noise else move for move in puzzle.solution]
        tokenizer = HanoiTokenizer()
        prompt = tokenizer.encode(text)
        input_ids = torch.tensor([*prompt, *tokenizer.encode(" ".join(moves)), tokenizer.eos_token_id])
        return {"input_ids": input_ids, "response_mask": torch.arange(len(input_ids)) >= len(prompt)}
