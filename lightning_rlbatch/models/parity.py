"""Compare log-probs, entropies and gradients of a model in every layout with those of each sample alone.

The reference is the model's own forward on one sample at a time, without padding, packing or ranks. Compared with it are log-probs,
entropies and the gradient of every trainable parameter, under a loss in which no two tokens weigh the same and none weighs nothing: a
token that is left out, counted twice or mistaken for its neighbour changes every gradient. All tokens but the first of each sample are
scored, whatever the batch's ``response_mask`` says, because mistakes sit where samples end and where shards meet.

How much of a difference is rounding depends on the model: on its depth, and on its weights. So it is measured: the plain forward runs in
fp64 too, and what it differs by from itself is what layouts may differ by, a few times over. Layouts round as often as the plain forward
does, only in another order: among toy models of up to 48 layers and SmolLM2-135M, the largest error of a layout was 0.4 to 1.4 times that
of the plain forward, while planted faults change gradients by 10% and more.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_rlbatch.distributed.mesh import Meshes
from lightning_rlbatch.distributed.reductions import gradient_scale
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.models.attention_backends import Backend
from lightning_rlbatch.models.probe import check_heads, evaluating
from lightning_rlbatch.models.scorer import TokenScorer

ENTROPY_WEIGHT = 0.3
TOLERANCE = 1e-5  # far above the rounding of fp64, and never less than that
ROUNDINGS = 5.0  # times the rounding of the plain forward that a layout may differ by
LARGEST_TOLERANCE = 5e-2  # what passes for rounding at most, also in 16 bits
SMALL_GRADIENT = 0.01  # share of the largest gradient below which a parameter's error is compared with that share instead


@dataclasses.dataclass(frozen=True)
class ParityRow:
    """How far one layout is from the plain forward; every error is relative to the largest value of the plain forward.

    Attributes:
        layout: Name of the layout.
        log_probs: Largest error of a log-prob.
        entropy: Largest error of an entropy.
        gradient: Largest error of any parameter's gradient, relative to that parameter's largest gradient (but to at least a
            hundredth of the largest gradient of all: some gradients are nothing but rounding).
        parameter: The parameter with that error.
        norm: Error of the norm of the whole gradient.
    """

    layout: str
    log_probs: float
    entropy: float
    gradient: float
    parameter: str
    norm: float

    @property
    def worst(self) -> float:
        """The largest error of the row; NaN if any is NaN."""
        errors = torch.tensor([self.log_probs, self.entropy, self.gradient, self.norm])
        return float(errors.max())  # unlike the built-in max, torch's does not lose a NaN


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The rows of a comparison; ``str(report)`` is a table.

    Attributes:
        rows: One per layout.
        tolerance: Largest error that passes in any case.
        rounding: What the plain forward differs by from itself in fp64; None if it was not measured. A few times of it pass too, for
            log-probs and entropies, and for gradients and their norm.
    """

    rows: tuple[ParityRow, ...]
    tolerance: float
    rounding: ParityRow | None = None

    @property
    def limits(self) -> tuple[float, float]:
        """Largest errors that pass: of log-probs and entropies, and of gradients and their norm."""
        if self.rounding is None:
            return self.tolerance, self.tolerance
        scores, gradients = max(self.rounding.log_probs, self.rounding.entropy), max(self.rounding.gradient, self.rounding.norm)
        return self._limit(scores), self._limit(gradients)

    def _limit(self, rounding: float) -> float:
        # a NaN of the plain forward is above no limit
        return max(self.tolerance, min(LARGEST_TOLERANCE, ROUNDINGS * rounding)) if rounding == rounding else self.tolerance

    def passes(self, row: ParityRow) -> bool:
        """Say whether every error of a row is within the limits; one that is NaN is not."""
        scores, gradients = self.limits
        return row.log_probs <= scores and row.entropy <= scores and row.gradient <= gradients and row.norm <= gradients

    @property
    def passed(self) -> bool:
        """Whether every layout passes."""
        return all(map(self.passes, self.rows))

    def __str__(self) -> str:
        width = max(len(row.layout) for row in self.rows)
        lines = [f"{'layout':{width}}  log-probs  entropy  gradient     norm  verdict  worst parameter"]
        for row in self.rows:
            errors = f"{row.log_probs:9.1e}  {row.entropy:7.1e}   {row.gradient:7.1e}  {row.norm:7.1e}"
            lines.append(f"{row.layout:{width}}  {errors}  {'ok' if self.passes(row) else 'DIFFERS':7}  {row.parameter}")
        return "\n".join([*lines, f"Largest error relative to each sample alone. {self.explanation}"])

    @property
    def explanation(self) -> str:
        """Which errors pass, and why."""
        if self.rounding is None:
            return f"Up to {self.tolerance:.0e} passes."
        scores, gradients = self.limits
        rounding = f"{max(self.rounding.log_probs, self.rounding.entropy):.0e} and {max(self.rounding.gradient, self.rounding.norm):.0e}"
        return (
            f"Up to {scores:.0e} (log-probs, entropy) and {gradients:.0e} (gradient, norm) pass: each sample alone differs by"
            f" {rounding} from itself in fp64."
        )


RunOnRanks: TypeAlias = Callable[[Callable[[Meshes], ParityRow]], ParityRow]
"""Runs a function on all ranks, each with its own meshes, and returns the row, which is the same on all of them."""


def compare_on_ranks(
    model: PreTrainedModel,
    batch: PackedBatch | None,
    *,
    sp_size: int = 1,
    run_on_ranks: RunOnRanks | None = None,
    temperature: float = 1.0,
    backend: Backend = "auto",
    tolerance: float | None = None,
    remove_padding: bool = True,
) -> ParityReport:
    """Compare padded, packed and, with ``run_on_ranks``, parallel log-probs, entropies and gradients with the plain forward's.

    Args:
        model: A causal LM, unsharded and without packed attention attached; it is left as it was. Dropout is off meanwhile.
        batch: Samples to compare on; None draws short random ones (`random_batch`).
        sp_size: Sequence-parallel ranks.
        run_on_ranks: Runs the last row on several ranks; None leaves it out.
        temperature: Divides the logits.
        backend: Kernel of the packed attention.
        tolerance: Largest relative error; None: 1e-5, and for models that are not in fp64 a few times their measured rounding, for which
            a copy of the model runs in fp64. Where that is not possible, 5e-5 per layer, and 5e-2 for 16 bits.
        remove_padding: False compares padded samples only, for a model that cannot run packed.

    Returns:
        The report.

    Raises:
        ValueError: The model cannot be run this way at all (see `attach_packed_attention`).
    """
    if sp_size > 1 and not remove_padding:
        raise ValueError(f"sp_size={sp_size} shards packed tokens, but remove_padding is False. Pass remove_padding=True, or sp_size=1.")
    check_heads(model.config, sp_size)
    batch = (random_batch(model.config.get_text_config().vocab_size) if batch is None else batch).to(model.device)
    weight = torch.linspace(0.5, 1.5, batch.num_tokens, device=batch.device) / batch.num_tokens
    batch = PackedBatch(
        [0, *torch.tensor(batch.seq_lens).cumsum(0).tolist()],
        {"input_ids": batch["input_ids"], "response_mask": batch.position_ids > 0, "weight": weight},
    )
    with evaluating(model):
        expected = _plain(model, batch, temperature)
        batch = batch.with_fields(per_token={"log_probs": expected.log_probs, "entropy": expected.entropy})
        padded = TokenScorer(model, remove_padding=False, probe=False)  # the table says more than a probe
        rows = [_row("padded", *_score(padded, batch, temperature), batch, expected)]
        if remove_padding:
            rows.append(_packed_row(model, batch, temperature, backend, expected))
            if run_on_ranks is not None:
                rows.append(run_on_ranks(lambda meshes: _parallel_row(model, batch, temperature, backend, expected, meshes)))
        if tolerance is not None or model.dtype == torch.float64:
            return ParityReport(tuple(rows), TOLERANCE if tolerance is None else tolerance)
        rounding = _rounding(model, batch, temperature, expected)
        return ParityReport(tuple(rows), _usual_rounding(model) if rounding is None else TOLERANCE, rounding)


def _rounding(model: PreTrainedModel, batch: PackedBatch, temperature: float, found: "_Result") -> ParityRow | None:
    """Compare the plain forward with itself in fp64; None if the model or the device has no fp64."""
    try:
        exact_model = cast(PreTrainedModel, cast(nn.Module, copy.deepcopy(model)).double())
        exact = _plain(exact_model, batch, temperature)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    exactly = batch.with_fields(per_token={"log_probs": exact.log_probs, "entropy": exact.entropy})
    return _row("each alone", found.log_probs, found.entropy, found.gradients, exactly, exact)


def _usual_rounding(model: PreTrainedModel) -> float:
    """Return a tolerance for rounding that cannot be measured: it grows with depth."""
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None) or 1
    return min(LARGEST_TOLERANCE, 5e-5 * layers) if model.dtype == torch.float32 else LARGEST_TOLERANCE


def random_batch(vocab_size: int, lengths: Sequence[int] = (13, 1, 6, 2, 9), seed: int = 0) -> PackedBatch:
    """Return samples of random tokens; the default has a sample of one token and a number of tokens that no P divides.

    Args:
        vocab_size: Token ids are below it.
        lengths: Tokens of each sample.
        seed: Seed of the tokens; the global random state is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_samples([{"input_ids": torch.randint(vocab_size, (length,), generator=generator)} for length in lengths])


@dataclasses.dataclass(frozen=True)
class _Result:
    log_probs: Tensor  # [T]
    entropy: Tensor  # [T]
    gradients: dict[str, Tensor]


def _gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        return {}
    found = torch.autograd.grad(loss, [parameter for _, parameter in named], allow_unused=True)
    return {name: torch.zeros_like(parameter) if grad is None else grad for (name, parameter), grad in zip(named, found)}


def _plain(model: PreTrainedModel, batch: PackedBatch, temperature: float) -> _Result:
    """Run each sample alone through the model's own forward and write the definitions down."""
    columns: tuple[list[Tensor], list[Tensor]] = ([], [])
    total: dict[str, Tensor] = {}
    for ids, weight in zip(batch.split_per_sample("input_ids"), batch.split_per_sample("weight")):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1)
        log_probs = log_p.gather(1, ids[1:, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        loss = (weight[1:] * (log_probs + ENTROPY_WEIGHT * entropy)).sum()
        for name, gradient in _gradients(model, loss).items():
            total[name] = total[name] + gradient if name in total else gradient
        for column, found in zip(columns, (log_probs, entropy)):
            column += [found.new_zeros(1), found.detach()]
    return _Result(torch.cat(columns[0]), torch.cat(columns[1]), total)


def _score(scorer: TokenScorer, batch: PackedBatch, temperature: float, factor: float = 1.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    scores = scorer(batch, temperature=temperature, with_entropy=True)
    loss = (batch["weight"] * (scores.log_probs + ENTROPY_WEIGHT * scores.entropy)).sum() * factor
    return scores.log_probs.detach(), scores.entropy.detach(), _gradients(scorer.model, loss)


def _row(layout: str, log_probs: Tensor, entropy: Tensor, gradients: dict[str, Tensor], batch: PackedBatch, expected: _Result) -> ParityRow:
    largest = max((float(gradient.abs().max()) for gradient in expected.gradients.values()), default=0.0)
    errors = [(_error(gradients[name], gradient, at_least=SMALL_GRADIENT * largest), name) for name, gradient in expected.gradients.items()]
    worst, parameter = max(errors, key=lambda error: (error[0] != error[0], error[0]), default=(0.0, "-"))  # NaN first
    return ParityRow(
        layout,
        _error(log_probs, batch["log_probs"], at_least=float(expected.log_probs.abs().max())),
        _error(entropy, batch["entropy"], at_least=float(expected.entropy.abs().max())),
        worst,
        parameter,
        _error(_norm(gradients), _norm(expected.gradients)),
    )


def _packed_row(model: PreTrainedModel, batch: PackedBatch, temperature: float, backend: Backend, expected: _Result) -> ParityRow:
    scorer = TokenScorer(model, attention_backend=backend, probe=False)
    assert scorer.attention is not None
    with scorer.attention:
        return _row("packed", *_score(scorer, batch, temperature), batch, expected)


def _parallel_row(
    model: PreTrainedModel, batch: PackedBatch, temperature: float, backend: Backend, expected: _Result, meshes: Meshes
) -> ParityRow:
    """Score this rank's share of the samples; the row is the same on all ranks."""
    mine = range(meshes.dp_rank, batch.num_samples, meshes.dp_size)
    share = batch.select(mine) if mine else PackedBatch.filler(batch.schema, max(2, meshes.sp_size), batch.device)
    scorer = TokenScorer(model, sp_group=meshes.sp_group, attention_backend=backend, probe=False)
    assert scorer.attention is not None
    with scorer.attention:
        log_probs, entropy, gradients = _score(scorer, share, temperature, gradient_scale(meshes, "fsdp"))
    for gradient in gradients.values():  # what FSDP and DDP do: the average over all ranks
        dist.all_reduce(gradient, group=meshes.world_group)
        gradient /= meshes.world_size
    layout = f"dp={meshes.dp_size}, sp={meshes.sp_size}"
    row = _row(layout, log_probs, entropy, gradients, share, expected)
    errors = torch.tensor([row.log_probs, row.entropy], dtype=torch.float64, device=batch.device).nan_to_num(torch.inf)
    dist.all_reduce(errors, op=dist.ReduceOp.MAX, group=meshes.world_group)
    return dataclasses.replace(row, log_probs=float(errors[0]), entropy=float(errors[1]))


def _norm(gradients: dict[str, Tensor]) -> Tensor:
    return torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm() if gradients else torch.zeros(())


def _error(found: Tensor, expected: Tensor, at_least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest expected value or to ``at_least``."""
    scale = max(float(expected.abs().max()), at_least, 1e-30)
    return float((found.double() - expected.double()).abs().max()) / scale
