"""Estimate what the forward and backward passes of an update hold beside the states of the models.

Letters: T tokens of one GPU, h hidden size, V vocabulary. ``tests/cli/test_memory.py`` compares the numbers with what tiny runs allocate.
"""

from dataclasses import dataclass, field

from lightning_rlbatch.cli.model_facts import ModelShape
from lightning_rlbatch.cli.run_config import RunConfig

# As models.scoring has them, which imports torch.
DIRECT_ELEMENTS = 1 << 21
CPU_TILE, ACCELERATOR_TILE = (512, 2048), (4096, 8192)
HEAD_MEMORY_MIB = 64.0
_MIB = 2**20


@dataclass(frozen=True)
class Numerics:
    """How wide the numbers of a run are.

    Attributes:
        states: Bytes of a weight, gradient or optimizer state.
        compute: Bytes of what is multiplied.
        sums: Bytes of logits, losses and norms.
        cast: True where each forward makes a copy of the weights for it (autocast).
        on_cpu: Whether the run is on CPUs.
    """

    states: int
    compute: int
    sums: int
    cast: bool
    on_cpu: bool

    @classmethod
    def of(cls, run: RunConfig) -> "Numerics":
        """Read a configuration.

        Args:
            run: The configuration.
        """
        precision = str(run.trainer.get("precision") or "32-true")
        states = {"bf16-true": 2, "16-true": 2, "64-true": 8, "64": 8}.get(precision, 4)  # fp32 under every mixed precision
        mixed = "16" in precision and states == 4
        compute = 2 if mixed else states
        on_cpu = run.trainer.get("accelerator") == "cpu"
        return cls(states, compute, max(states, 4), mixed and not run.sharded, on_cpu)


@dataclass(frozen=True)
class Passes:
    """What the update of one model holds at once, in bytes.

    Attributes:
        blocks: Activations that the blocks keep for their backward passes.
        recomputed: Those of one block that is run again (activation checkpointing); freed before the next.
        head_kept: What the LM head keeps between its forward and backward pass.
        head: The most that the LM head holds in its backward pass, ``head_kept`` included.
        more: Further things that are there all the time: name -> bytes.
    """

    blocks: int
    recomputed: int = 0
    head_kept: int = 0
    head: int = 0
    more: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """The most of all."""
        return self.blocks + max(self.head, self.recomputed) + sum(self.more.values())


def block_bytes(shape: ModelShape, numerics: Numerics) -> int:
    """Return what a block keeps of one token.

    Two norms keep their input and their normalised input, and the linear layers their inputs; attention keeps queries, keys, values and its
    result; the MLP four times its width.

    Args:
        shape: Of the model.
        numerics: Of the run.

    Source:
        The tensors that the backward pass of a pre-norm block with a gated MLP needs, counted by hand (the approach of Korthikanti et
        al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4). Norms compute in fp32, so with weights of
        16 bits their input is kept in fp32 too.
    """
    attention = 2 * shape.query + 2 * shape.key_value + (2 * shape.query if numerics.on_cpu else 0)  # a CPU kernel keeps two copies
    inner = (attention + 4 * shape.mlp) * numerics.compute + shape.heads * numerics.sums
    if numerics.cast:
        # Each of five linear layers casts a norm's result for itself; rotated queries and keys are fp32 first.
        rotated = (shape.query + shape.key_value) * numerics.sums
        return shape.hidden * (4 * numerics.sums + 5 * numerics.compute) + rotated + inner
    return 2 * shape.hidden * (numerics.sums + 2 * numerics.compute) + inner


def block_passes(shape: ModelShape, numerics: Numerics, tokens: int, recomputed: bool) -> Passes:
    """Return what the blocks of a model hold.

    Args:
        shape: Of the model.
        numerics: Of the run.
        tokens: T.
        recomputed: Whether only the inputs of blocks are kept (activation checkpointing).
    """
    block = tokens * block_bytes(shape, numerics)
    if not recomputed:
        return Passes(shape.layers * block)
    return Passes(shape.layers * tokens * shape.hidden * (numerics.sums if numerics.cast else numerics.compute), block)


def head_passes(
    run: RunConfig, shape: ModelShape, numerics: Numerics, tokens: int, *, weight_trained: bool, full_kl: bool
) -> tuple[int, int, dict[str, int]]:
    """Return what the LM head holds: kept between its passes, at most in its backward pass, and what the exact KL adds for all of the time.

    Few logits are kept whole, several times over. More are cut into tiles: two at a time, and those that ``head_memory_mib`` has room for.

    Args:
        run: The configuration.
        shape: Of the policy.
        numerics: Of the run.
        tokens: T, all of them scored.
        weight_trained: Whether the head's weight has a gradient.
        full_kl: Whether the divergence from the reference is summed over the vocabulary.
    """
    elements = tokens * shape.vocabulary
    more = {}
    if full_kl:
        clone = shape.table * numerics.compute if run.sharded else 0  # a gathered weight is gone after the reference's forward
        more["copy of the reference's LM head, and its states"] = clone + tokens * shape.hidden * numerics.compute
    if elements <= DIRECT_ELEMENTS and (numerics.on_cpu or numerics.compute == numerics.sums):
        # Copies of the logits that autograd keeps, and that exist at most; an entropy that is a metric only keeps none.
        kept, most = (5, 10) if full_kl else (2, 5) if run.model.get("entropy_coefficient") else (1, 3)
        return kept * elements * numerics.sums, most * elements * numerics.sums, more
    limit = run.model.get("head_memory_mib", HEAD_MEMORY_MIB)
    kept = min(int(limit * _MIB) if isinstance(limit, int | float) else 0, elements * numerics.sums)
    rows, columns = CPU_TILE if numerics.on_cpu else ACCELERATOR_TILE
    tile = min(rows, tokens) * min(columns, shape.vocabulary) * numerics.sums
    gradients = tokens * shape.hidden * numerics.sums + (shape.table * numerics.compute if weight_trained else 0)
    return kept, kept + (2 + 2 * full_kl) * tile + gradients * (1 + full_kl), more
