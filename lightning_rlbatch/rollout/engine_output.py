"""Take what an engine returned, whoever wrote it: as plain lists, or as an error that says what is wrong with it."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from lightning_rlbatch.rollout.engine import Completion, FinishReason


def checked_completions(engine: object, returned: Any, num_requests: int) -> list[Completion]:
    """Return an engine's completions with token ids and log-probs as lists of Python numbers; communicates with nobody.

    Args:
        engine: What returned them, for the message.
        returned: Any iterable of completions, whose token ids and log-probs may be lists, tensors or arrays.
        num_requests: How many there must be.

    Raises:
        TypeError: It is no iterable of :class:`Completion`.
        ValueError: Token ids that are no integers, not as many log-probs as tokens, or an unknown finish reason.
        RuntimeError: Another number of completions than requests.
    """
    name = type(engine).__name__
    if not isinstance(returned, Iterable):
        raise TypeError(f"{name}.generate must return a list of Completion, one per request, but returned {returned!r}.")
    completions = list(returned)
    if len(completions) != num_requests:
        raise RuntimeError(f"{name} returned {len(completions)} completions for {num_requests} requests.")
    return [_checked(name, index, completion) for index, completion in enumerate(completions)]


def _checked(name: str, index: int, completion: Any) -> Completion:
    if not isinstance(completion, Completion):
        raise TypeError(f"{name} returned {repr(completion)[:80]} for request {index} but must return a Completion for each.")
    where = f"of {name} for request {index}"
    try:
        token_ids = [operator.index(token) for token in _plain(completion.token_ids)]
    except TypeError:
        raise ValueError(f"Expected token_ids {where} to be integers but got {str(completion.token_ids)[:80]}.") from None
    try:
        log_probs = [float(value) for value in _plain(completion.log_probs)]
    except TypeError:
        log_probs = []
    if len(log_probs) != len(token_ids):
        raise ValueError(
            f"Expected as many log_probs as token_ids {where} but got {str(completion.log_probs)[:80]} for {len(token_ids)} tokens."
            " Return NaN for a log-prob that the engine does not know."
        )
    if completion.finish_reason not in get_args(FinishReason):
        known = " or ".join(map(repr, get_args(FinishReason)))
        raise ValueError(f"Expected the finish_reason {where} to be {known} but got {completion.finish_reason!r}.")
    return Completion(token_ids, log_probs, completion.finish_reason)


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, what: str) -> None:
    """Refuse tokens that a model has no embedding for, on the rank that sampled them; a GPU would say less.

    Args:
        token_ids: Of a prompt or a response.
        vocab_size: Number of embeddings.
        what: Names them at the beginning of a sentence.

    Raises:
        ValueError: Names the token and the vocabulary.
    """
    if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(
            f"{what} holds token {wrong} but the policy's vocabulary is 0 to {vocab_size - 1}. Use the tokenizer of the policy, and an"
            " engine that samples from it."
        )
