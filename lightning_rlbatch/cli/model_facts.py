"""What is known of a model without running it: its parameters and its configuration, from its files or from making it without weights."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlbatch.cli.imports import is_import_path
from lightning_rlbatch.cli.pretrained_names import cached_folder
from lightning_rlbatch.cli.rules_training import model_config


@dataclass(frozen=True)
class ModelFacts:
    """What is known of the policy without running it.

    Attributes:
        num_parameters: All of them.
        num_trained: Those that are trained.
        counted: Where the numbers come from: ``files`` (weight files), ``config`` (config.json) or ``model`` (made on no device).
        config: Its text configuration.
    """

    num_parameters: int
    num_trained: int
    counted: str
    config: dict[str, Any]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only model.

    Attributes:
        hidden: Hidden size.
        layers: Blocks.
        heads: Query heads.
        query: Width of all queries of a token.
        key_value: Width of all its keys.
        mlp: Inner width of the gated MLP; of a mixture the widths of the experts that a token visits.
        vocabulary: Entries.
        tied: Whether the LM head is the table of embeddings.
    """

    hidden: int
    layers: int
    heads: int
    query: int
    key_value: int
    mlp: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> "ModelShape | None":
        """Return the sizes that a configuration gives, None if one that matters is missing.

        Args:
            config: Text configuration of a model.
        """
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if not all(isinstance(config.get(name), int) for name in needed):
            return None
        hidden, layers, heads, vocabulary = (config[name] for name in needed)
        head_dim = config.get("head_dim") or hidden // heads
        mlp = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            query=heads * head_dim,
            key_value=(config.get("num_key_value_heads") or heads) * head_dim,
            mlp=mlp * (config.get("num_experts_per_tok") or 1),
            vocabulary=vocabulary,
            tied=bool(config.get("tie_word_embeddings")),
        )

    @property
    def table(self) -> int:
        """Parameters of the LM head, or of the table of embeddings."""
        return self.vocabulary * self.hidden


def model_facts(source: Any) -> ModelFacts | None:
    """Read what a model's files say; None if it has none here.

    Args:
        source: The model as configured; may be a folder, or the hub name of a model in the hub's cache.
    """
    folder = _folder_of(source) if isinstance(source, str) else None
    config = None if folder is None else model_config(str(folder))
    if folder is None or config is None:
        return None
    number, counted = count_parameters(folder, config)
    return None if number is None else ModelFacts(number, number, counted, config)


def _folder_of(source: str) -> Path | None:
    if Path(source).is_dir():
        return Path(source)
    return None if is_import_path(source) or source.count("/") > 1 else cached_folder(source)


def build_facts(source: Any) -> ModelFacts:
    """Make the policy without weights and count it; imports torch, transformers and the module that makes it.

    Args:
        source: The policy as configured.
    """
    import torch

    from lightning_rlbatch.cli.made import build_policy

    try:
        with torch.device("meta"):
            model = build_policy(source)
    except (NotImplementedError, RuntimeError):  # what makes it looks at the weights
        model = build_policy(source)
    parameters = list(model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return ModelFacts(sum(parameter.numel() for parameter in parameters), trained, "model", model.config.get_text_config().to_dict())


def count_parameters(folder: Path, config: dict[str, Any]) -> tuple[int | None, str]:
    """Count a model's parameters without loading it.

    Args:
        folder: Of the model.
        config: Its text configuration.

    Returns:
        The number, None if it cannot be known, and where it comes from.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return sum(_safetensors_elements(file) for file in files), "files"
    shape = ModelShape.of(config)
    if shape is None or not isinstance(config.get("intermediate_size"), int) or any("expert" in name for name in config):
        return None, ""
    block = 2 * shape.hidden * (shape.query + shape.key_value) + 3 * shape.hidden * shape.mlp + 2 * shape.hidden
    return shape.layers * block + shape.table * (1 if shape.tied else 2) + shape.hidden, "config"


def _safetensors_elements(file: Path) -> int:
    with file.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    total = 0
    for name, entry in header.items():
        if name != "__metadata__":
            elements = 1
            for size in entry["shape"]:
                elements *= size
            total += elements
    return total
