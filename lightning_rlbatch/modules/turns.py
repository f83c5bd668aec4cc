"""Sample responses of one turn, or of many turns between the policy and an environment.

Invariants:

1. Tokens are never sampled, encoded or decoded twice: a later turn continues the token ids of the earlier ones.
2. Tokens of the environment are in the sequence, not in the response mask; log-probs lie at the tokens that they belong to.
3. A response with all its turns has at most ``max_response_length`` tokens; a reply that would leave no room to answer is left out.
4. A response depends on its prompt and seed alone, on any number of ranks.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist

from lightning_rlbatch.data.chat import Conversation, encode_rendered, encode_reply
from lightning_rlbatch.data.prompt_reading import template_options
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.distributed.failure import fail_together
from lightning_rlbatch.distributed.reductions import all_gather_ints
from lightning_rlbatch.modules.calls import accepted, call_together, one_for_each
from lightning_rlbatch.rollout.dispatch import generate_together
from lightning_rlbatch.rollout.engine import (
    Completion,
    FinishReason,
    ProgressCallback,
    RolloutEngine,
    RolloutRequest,
    SamplingParams,
    rollout_seed,
)

Environment: TypeAlias = Callable[..., Any]
"""What answers the policy's turns: ``environment(prompts, completions, turns, turn, **columns)``, arguments it does not take left out.

Called with those responses whose turn ended with the end token: ``prompts`` and ``completions`` so far as reward functions get them,
``turns`` the texts of the turns that just ended, ``turn`` their number from 0, columns one value per response. Returns for each
response the text that comes next (for a conversation also a message, such as ``{"role": "tool", "content": ...}``, or a list of them), or
None to end it; may be ``async``. It may not rely on which responses come together in one call."""


@dataclasses.dataclass
class Response:
    """What followed a prompt.

    Attributes:
        prompt: Index of the prompt in its batch.
        seed: Seed of the first turn.
        token_ids: Tokens of all turns, the policy's and the environment's.
        log_probs: Of each token; 0 for the environment's.
        sampled: True for each token that the policy sampled.
        messages: One per turn (a reply may have several), with ``role`` and ``content``.
        finish_reason: ``"length"`` if the response was cut off at the most tokens it may have.
    """

    prompt: int
    seed: int
    token_ids: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)
    messages: Conversation = dataclasses.field(default_factory=list)
    finish_reason: FinishReason = "stop"

    @property
    def completion(self) -> Completion:
        """All turns as one completion."""
        return Completion(self.token_ids, self.log_probs, self.finish_reason)

    def add_turn(self, completion: Completion, text: str) -> None:
        """Append a turn of the policy."""
        self.token_ids += completion.token_ids
        self.log_probs += completion.log_probs
        self.sampled += [True] * len(completion.token_ids)
        self.messages.append({"role": "assistant", "content": text})
        self.finish_reason = completion.finish_reason

    def add_reply(self, token_ids: list[int], messages: Conversation) -> None:
        """Append a turn of the environment."""
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids)
        self.sampled += [False] * len(token_ids)
        self.messages += messages


class ResponseSampler:
    """Samples this rank's responses to prompts; the ranks of a tensor-parallel group call it together.

    Args:
        engine: Samples completions.
        prompts: Prompts over all ranks.
        sampling: How turns are drawn; ``max_new_tokens`` bounds a response with all its turns.
        group: Tensor-parallel group of the engine; None if it serves this rank alone.
        environment: Answers the policy's turns; None for responses of one turn.
        max_turns: Most turns of the policy; None for as many as fit.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: PromptBatch,
        sampling: SamplingParams,
        *,
        group: dist.ProcessGroup | None,
        environment: Environment | None,
        max_turns: int | None,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._group = group
        self._environment = environment
        self._max_turns = max_turns

    def sample(self, responses: list[Response], on_progress: ProgressCallback | None = None) -> None:
        """Fill responses that have a prompt and a seed, in place.

        Every error is raised on all ranks of the tensor-parallel group.

        Args:
            responses: This rank's; may be empty.
            on_progress: Told about finished first turns, and sampled tokens.
        """
        speaking, turn = responses, 0
        # The group's ranks go on together until none of them has a response left.
        while turn == 0 or any(count for (count,) in all_gather_ints([len(speaking)], self._group)):
            completions = generate_together(
                self._engine, [self._request(response, turn) for response in speaking], self._sampling, self._group, on_progress
            )
            with fail_together(self._group, "environment"):
                for response, completion in zip(speaking, completions):
                    self._add(response, completion)
                turn += 1
                speaking = self._reply(speaking, turn)
            if self._environment is None:
                return
            if on_progress is not None and turn == 1:
                on_progress = _tokens_only(on_progress)

    def _request(self, response: Response, turn: int) -> RolloutRequest:
        prompt = self._prompts.prompt_ids[response.prompt]
        if turn == 0:
            return RolloutRequest(prompt, response.seed)
        seed = rollout_seed(response.seed, turn, 0, 0)
        return RolloutRequest(prompt + response.token_ids, seed, max_new_tokens=self._room(response))

    def _room(self, response: Response) -> int:
        return self._sampling.max_new_tokens - len(response.token_ids)

    def _add(self, response: Response, completion: Completion) -> None:
        room = self._room(response)
        if len(completion.token_ids) > room:  # an engine that does not know limits of single requests
            completion = Completion(completion.token_ids[:room], completion.log_probs[:room], "length")
        response.add_turn(completion, self._prompts.tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    def _reply(self, responses: list[Response], turn: int) -> list[Response]:
        """Let the environment answer; return the responses that go on."""
        answered = [response for response in responses if response.finish_reason == "stop"]
        if self._environment is None or not answered or turn == self._max_turns:
            return []
        call = functools.partial(self._environment, **self._arguments(answered, turn - 1))
        returned = call_together({"environment": call})["environment"]
        replies = one_for_each("The environment", returned, answered, "one reply (or None) per completion", "replies")
        return [response for response, reply in zip(answered, replies) if reply is not None and self._goes_on(response, reply)]

    def _arguments(self, responses: list[Response], turn: int) -> dict[str, Any]:
        assert self._environment is not None
        told = texts(self._prompts, responses)
        arguments = {
            **told.columns,
            "prompts": told.prompts,
            "completions": told.completions,
            "turns": [response.messages[-1]["content"] for response in responses],
            "turn": turn,
        }
        return accepted("The environment", self._environment, arguments)

    def _goes_on(self, response: Response, reply: Any) -> bool:
        messages = _messages(reply, is_text=_is_text(self._prompts, response))
        token_ids = self._encode(response, messages)
        if len(token_ids) >= self._room(response):
            response.finish_reason = "length"
            return False
        response.add_reply(token_ids, messages)
        return True

    def _encode(self, response: Response, reply: Conversation) -> list[int]:
        prompts = self._prompts
        try:
            if _is_text(prompts, response):
                return encode_rendered(prompts.tokenizer, reply[0]["content"])
            return encode_reply(prompts.tokenizer, reply, template_options(prompts.columns[response.prompt]))
        except Exception as error:  # a tokenizer or its template may raise anything
            told = f"{repr(reply)[:80]} ({type(error).__name__}: {error})"
            raise ValueError(f"The environment's reply cannot be tokenized: {told}.") from error


def _messages(reply: Any, *, is_text: bool) -> Conversation:
    """Return the messages of an environment's reply."""
    if isinstance(reply, str):
        return [{"role": "user", "content": reply}]
    given = [reply] if isinstance(reply, Mapping) else reply
    are_messages = isinstance(given, list | tuple) and all(isinstance(message, Mapping) and "role" in message for message in given)
    if is_text or not are_messages or not given:
        wanted = "text or None" if is_text else "text, a message with a 'role', a list of these, or None"
        raise TypeError(f"The environment must return {wanted} for each response but returned {repr(reply)[:80]}.")
    return [dict(message) for message in given]


def _is_text(prompts: PromptBatch, response: Response) -> bool:
    """Return whether the response's prompt was given as text, not as messages."""
    return prompts.conversation(response.prompt) is None


class Texts(NamedTuple):
    """What reward functions and environments are told of responses, one entry per response.

    A prompt that was given as messages stays a list of messages, and its completion is one: turns of the policy and replies.

    Attributes:
        prompts: Text or messages.
        completions: Text of all turns, or a message per turn.
        columns: The other columns of the prompts' rows, by name.
    """

    prompts: list[str | Conversation]
    completions: list[str | Conversation]
    columns: dict[str, list[Any]]


def texts(prompts: PromptBatch, responses: Sequence[Response]) -> Texts:
    """Return the texts of responses to some of the prompts; lists and mappings are copies, which functions of the user's own may change."""
    names = sorted({name for row in prompts.columns for name in row})
    chosen = [(response, prompts.conversation(response.prompt)) for response in responses]
    return Texts(
        prompts=[prompts.prompts[response.prompt] if messages is None else copy.deepcopy(messages) for response, messages in chosen],
        completions=[
            prompts.tokenizer.decode(response.token_ids, skip_special_tokens=True)
            if messages is None
            else [dict(message) for message in response.messages]
            for response, messages in chosen
        ],
        columns={name: [_copied(prompts.columns[response.prompt].get(name)) for response in responses] for name in names},
    )


def _copied(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, list | dict) else value


def _tokens_only(on_progress: ProgressCallback) -> ProgressCallback:
    """Keep later turns of a rollout from being counted as rollouts."""
    return lambda num_finished, num_tokens: on_progress(0, num_tokens)
