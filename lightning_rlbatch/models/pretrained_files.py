"""Say whether a folder holds a tokenizer: the standard library only, since ``rlbatch explain`` asks too."""

from pathlib import Path

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json", "tokenizer*.json")
_MODEL_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


def is_model_without_tokenizer(folder: Path) -> bool:
    """Whether a folder holds the weights of a model, and no file of a tokenizer.

    Args:
        folder: Of a pretrained model.
    """
    return any(map(any, map(folder.glob, _MODEL_FILES))) and not any(map(any, map(folder.glob, _TOKENIZER_FILES)))


def without_tokenizer(source: str) -> str:
    """Return the sentence about such a folder.

    Args:
        source: As the user wrote it.
    """
    return f"{source} holds a model without a tokenizer. Name the folder or hub name of the model that it was trained from."
