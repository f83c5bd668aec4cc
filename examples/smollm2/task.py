"""Sums in words and numbers: prompts of reasoning-gym as conversations, answers judged by its own verifier."""

import functools
import re
from collections.abc import Sequence
from typing import Any

QUESTION = re.compile(r": (.*) =$")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
SHORT_NUMBER = re.compile(r"(?:^|\s)-?\d{1,3}\.?\s*$")
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
    """Reward brevity: 1 for a number of at most three digits alone, 1/2 for two words that end with one, 1/3 for three and so on.

    Without the bound on digits a policy learns to count up in one endless word.

    Args:
        prompts: Conversations.
        completions: The assistant's message each.
        **columns: Not used.

    Example:
        >>> brief([None] * 4, [[{"content": text}] for text in ("-7", "It is 7.", "Sure!", "123456")])
        [1.0, 0.3333333333333333, 0.0, 0.0]
    """
    texts = [messages[0]["content"] for messages in completions]
    return [1.0 / len(text.split()) if SHORT_NUMBER.search(text) else 0.0 for text in texts]
