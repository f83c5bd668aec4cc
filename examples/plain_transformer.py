"""Train a transformer that is a plain ``nn.Module`` on packed samples, its sequence split over several ranks.

Run ``python -m examples.plain_transformer``. It trains the same model on 1, 2 and 4 processes and prints the losses, which are equal
but for rounding: one call, ``ulysses_attention``, is all that a model needs to be split. It takes a few seconds on a laptop.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: forked ranks of a multi-threaded parent hang

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_rlbatch.distributed.ulysses import gather_sequence, shard_sequence, ulysses_attention
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.testing import run_distributed

VOCABULARY, NUM_STEPS = 20, 5


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input.

    Args:
        size: Hidden size.
        num_heads: Query heads; the number of ranks may be anything up to it.
        num_kv_heads: Key/value heads, a divisor of it.
    """

    def __init__(self, size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.heads = (num_heads, num_kv_heads, num_kv_heads)
        head_dim = size // num_heads
        self.qkv = nn.Linear(size, sum(self.heads) * head_dim)
        self.out = nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))

    def forward(self, hidden: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Map this rank's tokens ``[t, size]``; ``cu_seqlens`` are the boundaries of the samples in the whole sequence."""
        projected = self.qkv(self.norms[0](hidden)).unflatten(1, (sum(self.heads), -1))  # [t, Hq + 2 Hk, D]
        attended = ulysses_attention(*torch.split(projected, self.heads, dim=1), cu_seqlens, group=group)
        hidden = hidden + self.out(attended.flatten(1))
        return hidden + self.mlp(self.norms[1](hidden))


class PlainTransformer(nn.Module):
    """A small language model with learned positions.

    Args:
        size: Hidden size.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        num_blocks: Layers.
        max_length: Longest sample in tokens.
    """

    def __init__(self, size: int = 28, num_heads: int = 7, num_kv_heads: int = 1, num_blocks: int = 2, max_length: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, size), nn.Embedding(max_length, size)
        self.blocks = nn.ModuleList(Block(size, num_heads, num_kv_heads) for _ in range(num_blocks))
        self.head = nn.Linear(size, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Return logits ``[t, VOCABULARY]`` of this rank's tokens."""
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, cu_seqlens, group)
        return self.head(hidden)


def mean_loss(model: PlainTransformer, batch: PackedBatch, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mean cross-entropy of the next token, the same on every rank of the group."""
    labels = batch["input_ids"].roll(-1)  # shifted before the sequence is cut: the next token may be on the next rank
    labels[batch.cu_seqlens[1:].long() - 1] = -100  # the last token of a sample predicts nothing
    logits = model(shard_sequence(batch["input_ids"], group), shard_sequence(batch.position_ids, group), batch.cu_seqlens, group)
    losses = functional.cross_entropy(logits, shard_sequence(labels, group, pad_value=-100), reduction="none")
    return gather_sequence(losses, group, batch.num_tokens).sum() / (batch.num_tokens - batch.num_samples)


def make_batch(step: int) -> PackedBatch:
    """Return three samples that count upwards."""
    generator = torch.Generator().manual_seed(step)
    samples = [torch.randint(VOCABULARY, (1,), generator=generator) + torch.arange(length) for length in (11, 3, 7)]
    return PackedBatch.from_samples([{"input_ids": sample % VOCABULARY} for sample in samples])


def train(rank: int, world_size: int) -> list[float]:
    """Train for a few steps with all ranks on one sequence; return the losses."""
    torch.manual_seed(0)
    model = PlainTransformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(NUM_STEPS):
        loss = mean_loss(model, make_batch(step), dist.group.WORLD)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # FSDP and DDP do this by themselves
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train on 1, 2 and 4 ranks and print the losses side by side."""
    for world_size in (1, 2, 4):
        losses = run_distributed(train, world_size)[0]
        print(f"{world_size} rank(s): " + "  ".join(f"{loss:.6f}" for loss in losses))


if __name__ == "__main__":
    main()
