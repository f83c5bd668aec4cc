"""One training step over sequence-parallel ranks, in parts that a test can break on purpose, and the plain step that it must equal.

Loss = sum over all tokens of weight * (cross-entropy of the next token of the same sample) + z-loss of every token, divided by the
number of tokens of the whole mini-batch. Weights are 1 at the borders of shards: a wrong label there would be invisible under weight 0.
"""

import copy

import torch
import torch.distributed as dist
from tiny_models import VOCAB, tiny_model

from lightning_rlbatch.distributed.ulysses import gather_sequence, shard_sequence
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.attention import attach_packed_attention
from lightning_rlbatch.models.packed_inputs import packed_model_kwargs


def make_batch(lengths, seed=0, response=None):
    """Make samples of random tokens; ``response`` limits the weighted tokens to a range of the packed sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    ids = torch.randint(1, VOCAB, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator) + 0.5
    for size in (2, 4):
        shard = -(-tokens // size)
        weights[[t for t in range(tokens) if t % shard in (0, shard - 1)]] = 1.0
    if response is not None:
        keep = torch.zeros(tokens)
        keep[response] = 1
        weights = weights * keep
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return PackedBatch(bounds, {"input_ids": ids, "weights": weights})


def token_terms(logits, labels, weights):
    """Terms ``[t]``: weighted cross-entropy where there is a label (not -1), and z-loss everywhere."""
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, weights * (lse - chosen), 0) + 0.01 * lse.square()


class Step:
    """The right step; each method is one thing that is commonly done wrong."""

    def labels(self, batch, group):
        """Labels of this rank's tokens: shifted on the whole sequence, then cut."""
        ends = batch.cu_seqlens[1:].long() - 1
        labels = batch["input_ids"].roll(-1)
        labels[ends] = -1
        return shard_sequence(labels, group, pad_value=-1)

    def model_kwargs(self, batch, group):
        return packed_model_kwargs(batch, sp_group=group)

    def loss(self, local_terms, batch, group, dp_size, total_tokens):
        """Loss that every rank of the group back-propagates; FSDP averages the gradients over dp * sp ranks."""
        return dp_size * gather_sequence(local_terms, group, batch.num_tokens).sum() / total_tokens

    def run(self, model, batch, group, dp_size, total_tokens):
        """Return the loss of the mini-batch (as dp * sp ranks report it together) and the averaged gradients."""
        logits = model(**self.model_kwargs(batch, group)).logits[0]
        weights = shard_sequence(batch["weights"], group)
        loss = self.loss(token_terms(logits, self.labels(batch, group), weights), batch, group, dp_size, total_tokens)
        parameters = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        flat = torch.cat([loss.detach().view(1), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat)
        reported, *averaged = torch.split(flat / dist.get_world_size(), [1, *(gradient.numel() for gradient in gradients)])
        return float(reported), {name: part.view_as(parameters[name]) for name, part in zip(parameters, averaged)}


def plain_step(model, batches):
    """The reference: every sample alone, the model's own eager attention, one rank, one backward."""
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    total = sum(batch.num_tokens for batch in batches)
    loss = torch.zeros(())
    for batch in batches:
        for ids, weights in zip(batch.split_per_sample("input_ids"), batch.split_per_sample("weights")):
            logits = reference(ids.unsqueeze(0), use_cache=False).logits[0]
            loss = loss + token_terms(logits, torch.cat((ids[1:], torch.tensor([-1]))), weights).sum() / total
    parameters = dict(reference.named_parameters())
    return float(loss.detach()), dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))


def relative_errors(loss, gradients, expected_loss, expected):
    """Errors of loss, global norm and every parameter's gradient, each relative to its own size.

    Gradients much smaller than the largest one (of keys, for example) are differences of nearly equal numbers: theirs are relative to a
    hundredth of the largest.
    """
    floor = 1e-2 * max(float(grad.abs().max()) for grad in expected.values())
    errors = {name: float((gradients[name] - grad).abs().max()) / max(float(grad.abs().max()), floor) for name, grad in expected.items()}
    norm, expected_norm = (torch.cat([grad.flatten() for grad in grads.values()]).norm().item() for grads in (gradients, expected))
    return errors | {"loss": abs(loss - expected_loss) / abs(expected_loss), "norm": abs(norm - expected_norm) / expected_norm}


class Case:
    """A model, the batch of each data-parallel rank, and what the plain step gives; made once, before ranks are forked."""

    def __init__(self, family, batches, **changes):
        self.model, self.batches = tiny_model(family, **changes), batches
        self.expected = plain_step(self.model, batches)

    def errors(self, groups, step=None):
        """Run the step on this rank's share and compare; called inside a forked rank."""
        dp_size = len(self.batches)
        dp_rank = dist.get_rank() * dp_size // dist.get_world_size()
        with attach_packed_attention(self.model, sp_group=groups[dp_rank], probe=False):  # other tests probe; this one is long
            result = (step or Step()).run(self.model, self.batches[dp_rank], groups[dp_rank], dp_size, self.total_tokens)
        return relative_errors(*result, *self.expected)

    @property
    def total_tokens(self):
        return sum(batch.num_tokens for batch in self.batches)


def sp_groups(dp_size):
    """Make the sequence-parallel groups of all data-parallel ranks, neighbours together; a collective call."""
    sp_size = dist.get_world_size() // dp_size
    return [dist.new_group(list(range(rank * sp_size, (rank + 1) * sp_size))) for rank in range(dp_size)]
