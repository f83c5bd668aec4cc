"""Sums in words and numbers: prompts of reasoning-gym as conversations, answers judged by its own verifier."""

import functools
import re
from collections.abc import Sequence
from typing import Any

QUESTION = re.compile(r": (.*) =$")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SYSTEM = "You are a calculator. Reply with the result only."


@functools.cache
def _sums() -> Any:
    # here and not above: the package imports a hundred data sets, which takes a second
    from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

    return ChainSumDataset(ChainSumConfig(min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=256, seed=0))


def train_prompts() -> list[dict[str, Any]]:
    """Return sums and differences of two numbers below 100: rows with ``prompt`` (messages) and the column ``index``."""
    return [{"prompt": conversation(entry["question"]), "index": index} for index, entry in enumerate(_sums())]


def conversation(question: str) -> list[dict[str, str]]:
    """Return the messages for one of reasoning-gym's questions.

    Example:
        >>> conversation("State the final answer to the following arithmetic problem: 3 + 4 =")[1]["content"]
        'What is 3 + 4?'
    """
    found = QUESTION.search(question)
    assert found is not None, question
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {found[1]}?"}]


def last_number(text: str) -> str | None:
    """Return the last number of a text, which is what an answer ends with.

    Example:
        >>> last_number("3 + 4 = 7."), last_number("No idea")
        ('7', None)
    """
    found = NUMBER.findall(text)
    return found[-1].rstrip(",") if found else None


def correct(prompts: Sequence[Any], completions: Sequence[list[dict[str, str]]], index: Sequence[int], **columns: Any) -> list[float]:
    """Reward 1 for the right result and 0 for anything else.

    Args:
        prompts: Conversations.
        completions: The assistant's message each.
        index: Which of reasoning-gym's questions was asked.
        **columns: Further columns; not used.
    """
    answers = [last_number(messages[0]["content"]) for messages in completions]
    return [float(answer is not None and _sums().score_answer(answer, _sums()[i]) >= 1.0) for answer, i in zip(answers, index)]


def brief(prompts: Sequence[Any], completions: Sequence[list[dict[str, str]]], **columns: Any) -> list[float]:
    """Reward an answer that is nothing but a number.

    Args:
        prompts: Conversations.
        completions: The assistant's message each.
        **columns: Not used.
    """
    return [float(NUMBER.fullmatch(messages[0]["content"].strip().rstrip(".")) is not None) for messages in completions]
