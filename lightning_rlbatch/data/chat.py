"""Turn the messages of a conversation into token ids."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from lightning_rlbatch.data.prompts import Tokenizer

Conversation: TypeAlias = list[dict[str, Any]]
"""Messages, each with a ``role`` and usually a ``content``, oldest first."""

_ANSWER = "@answer@"  # stands for the policy's turn while the template is asked what comes behind it


def as_conversation(prompt: Any) -> Conversation | None:
    """Return a prompt's messages, or None if it is a text.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(prompt, str):
        return None
    is_list = isinstance(prompt, Sequence) and len(prompt) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in prompt):
        raise ValueError(f"a prompt must be text, or a list of messages with 'role' and 'content', but is {repr(prompt)[:80]}")
    # Parquet gives every message the keys of all of them.
    return [{key: value for key, value in message.items() if value is not None or key == "content"} for message in prompt]


def render(tokenizer: "Tokenizer", messages: Conversation, options: Mapping[str, Any] | None = None) -> str:
    """Return the text that the tokenizer's chat template makes of messages, ending where the policy begins to speak.

    If the last message is the assistant's, the policy continues it.

    Args:
        tokenizer: Has a chat template.
        messages: At least one.
        options: Further arguments of ``apply_chat_template``, such as ``tools``.

    Raises:
        TypeError: The tokenizer has no ``apply_chat_template``.
        ValueError: It has no template.
    """
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None:
        raise TypeError(
            f"Prompts that are lists of messages need a tokenizer with apply_chat_template, but {type(tokenizer).__name__} has none."
            " Use a transformers tokenizer with a chat template, or give prompts as text."
        )
    continues = messages[-1]["role"] == "assistant"
    text: str = apply(messages, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues, **(options or {}))
    return text


def encode_rendered(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Return the token ids of a text as it stands: no special tokens are added, those spelled out in it are recognised."""
    parameters = inspect.signature(tokenizer.encode).parameters.values()
    takes_option = any(parameter.name == "add_special_tokens" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return list(tokenizer.encode(text, **({"add_special_tokens": False} if takes_option else {})))


def encode_reply(tokenizer: "Tokenizer", reply: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None) -> list[int]:
    """Return what stands between the end of a policy's turn and the beginning of its next one, if ``reply`` lies between.

    The template renders a stand-in for the policy's turn followed by the reply. Nothing that was sampled is rendered again, since
    a template may change it and text may be tokenized otherwise than it was sampled.

    Args:
        tokenizer: Has a chat template.
        reply: Messages of the user, or of tools.
        options: As for :func:`render`.

    Raises:
        ValueError: The template does not show the turns in order.
    """
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}, *map(dict, reply)]
    _, found, behind = render(tokenizer, messages, options).partition(_ANSWER)
    if not found:
        raise ValueError("The chat template leaves out the assistant's turn before the last message, so turns cannot follow each other.")
    end = getattr(tokenizer, "eos_token", None)
    space, ends, rest = behind.partition(end) if isinstance(end, str) else (behind, "", "")
    return encode_rendered(tokenizer, rest if ends and not space.strip() else behind)  # the policy has sampled the end token
