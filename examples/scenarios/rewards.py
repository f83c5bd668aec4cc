"""A reward that random weights can collect, so that the scenarios need no warm-up."""

from collections.abc import Sequence

from examples.hanoi.task import MOVES, HanoiTokenizer

_FIRST_MOVE = HanoiTokenizer.vocab_size - len(MOVES)  # the moves are the last tokens of the vocabulary


def move_share(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """Reward the share of sampled tokens that are moves: the first thing that an untrained policy learns about the task.

    Args:
        prompts: Prompt texts; not looked at.
        completion_ids: Sampled tokens of each completion.

    Example:
        >>> move_share(["2:A>B="], [[14, 19, 3, 1]])
        [0.5]
    """
    return [sum(token >= _FIRST_MOVE for token in tokens) / max(len(tokens), 1) for tokens in completion_ids]
