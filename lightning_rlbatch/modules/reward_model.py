"""Score rollouts with a reward model: a transformers sequence classifier with one label, forward only, balanced over ranks."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.mini_batch import MiniBatch
from lightning_rlbatch.data.sources import import_callable
from lightning_rlbatch.distributed.exchange import exchange_samples
from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import all_gather_lengths
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.pretrained import require_pretrained
from lightning_rlbatch.models.scorer import TokenScorer
from lightning_rlbatch.models.without_weights import make_without_weights
from lightning_rlbatch.modules.model_sources import ModelSource, disable_dropout


def build_reward_scorer(
    source: ModelSource, *, remove_padding: bool, sp_group: dist.ProcessGroup | None, without_weights: bool = False
) -> TokenScorer:
    """Load a reward model and make it score packed samples.

    The classifier's head reads the hidden state of a sample's last token. That is the value head of :class:`TokenScorer` at one token
    more, which causal attention keeps from changing anything before it.

    Args:
        source: A function that makes the model, its import path, or the folder or hub name of a pretrained one.
        remove_padding: See :class:`TokenScorer`.
        sp_group: See :class:`TokenScorer`.
        without_weights: True makes a model whose parameters are on the meta device if that is possible, for a strategy that brings the
            weights from rank 0.

    Returns:
        A frozen scorer in evaluation mode.

    Raises:
        TypeError: The source makes something else than a transformers model.
        ValueError: There is no such folder or hub name, or the model has no head named ``score`` with one output.
    """
    maker = import_callable(source) if isinstance(source, str) else source
    if maker is None:
        model: object = _pretrained(cast(str, source), without_weights)
    else:
        model = make_without_weights(maker) if without_weights else maker()
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"Expected reward_model to make a transformers model but got {type(model).__name__}.")
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ValueError(
            f"reward_model {type(model).__name__} needs a linear head `score` with one output (AutoModelForSequenceClassification with"
            f" num_labels=1), got {head}."
        )
    disable_dropout(model)
    scorer = TokenScorer(cast(PreTrainedModel, model.base_model), value_head=True, remove_padding=remove_padding, sp_group=sp_group)
    assert scorer.value_head is not None
    with torch.no_grad():
        scorer.value_head.weight.copy_(head.weight)
        scorer.value_head.bias.copy_(torch.zeros(1) if head.bias is None else head.bias)
    scorer.requires_grad_(False)
    return scorer.eval()


def _pretrained(source: str, without_weights: bool) -> object:
    require_pretrained(source, "reward_model")
    config = AutoConfig.from_pretrained(source)
    if not without_weights or config.dtype is None:  # only the weights tell their dtype
        return AutoModelForSequenceClassification.from_pretrained(source)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, dtype=config.dtype)  # type: ignore[no-untyped-call]  # no type there


def score_sequences(
    sequences: Sequence[Sequence[int]], scorer: nn.Module, options: BatchingOptions, meshes: Meshes, device: torch.device
) -> list[float]:
    """Return the reward of each of this rank's sequences; collective over all ranks.

    Sequences are spread over the data-parallel ranks by workload, scored in as many micro-batches everywhere, and the rewards sent back.

    Args:
        sequences: Token ids of prompt and completion, without padding; any number on any rank.
        scorer: What :func:`build_reward_scorer` made, sharded or not.
        options: Token budgets; the forward-only one applies.
        meshes: Groups of the run.
        device: Where the model computes.
    """
    samples = _with_end([list(sequence) for sequence in sequences])
    per_rank = all_gather_lengths(samples.lengths, meshes.world_group)
    lengths = [length for rank in per_rank for length in rank]
    if not lengths:
        return []
    first = sum(len(rank) for rank in per_rank[: meshes.rank])
    plan = options.plan(lengths, meshes, role="log_prob")
    holder = {index: dp_rank for dp_rank, held in enumerate(plan.samples_per_rank) for index in held}
    own = range(first, first + samples.num_samples)
    received, route = exchange_samples(samples, [meshes.ranks_of_dp(holder[index]) for index in own], meshes.world_group, order=list(own))
    place = {index: position for position, index in enumerate(sorted(i for i, rank in holder.items() if rank == meshes.dp_rank))}
    buckets = [[place[index] for index in bucket] for bucket in plan.assignment[meshes.dp_rank]]
    batch = MiniBatch.cut(received.to(device), buckets, sp_size=meshes.sp_size)
    rewards = torch.zeros(received.num_samples, dtype=torch.float64)
    for bucket, micro_batch in zip(buckets, batch.micro_batches):
        values = scorer(micro_batch, with_log_probs=False, with_values=True).values
        if bucket:
            rewards[bucket] = values[micro_batch["response_mask"]].double().cpu()
    scores: Tensor = route.back(per_sample={"reward": rewards})["reward"]
    return cast(list[float], scores.tolist())


def _with_end(sequences: list[list[int]]) -> PackedBatch:
    rows = [
        {"input_ids": torch.tensor([*ids, 0], dtype=torch.int64), "response_mask": torch.arange(len(ids) + 1) == len(ids)}
        for ids in sequences or [[0, 0]]
    ]
    packed = PackedBatch.from_samples(rows)
    return packed if sequences else PackedBatch.empty(packed.schema)
