"""Every policy loss under every aggregation, with KL, entropy and value terms, in every layout and cut: one gradient, one set of metrics.

``test_invariance.py`` follows gradients to the weights of a model. Between a model's outputs and its weights they are linear, so a few
losses will do for that; here every combination of terms has its turn. The log-probs, entropies and values of a real model in the layout at
hand (packed, padded, sequence-parallel) get a trainable offset for each combination and token, in one table that the strategy shards and
reduces like any weight. Its gradient is what reaches each token's outputs, for all combinations in one step of the real ``PPOModule``.
"""

import dataclasses
import inspect

import numpy
import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples, with_policy_log_probs
from helpers import StepRecorder, frozen_sgd, length_reward, make_trainer, tiny_llama

from lightning_rlbatch import functional
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.store import SAMPLE_ID
from lightning_rlbatch.distributed.reductions import all_reduce_sums
from lightning_rlbatch.functional import (
    AGGREGATION_MODES,
    CISPO,
    DPPO,
    GAE,
    GMPO,
    GSPO,
    SAPO,
    ClipCov,
    FunctionLoss,
    KLCov,
    LossTerms,
    PolicyLoss,
    PPOClip,
    Reinforce,
)
from lightning_rlbatch.models.scorer import TokenScores
from lightning_rlbatch.modules import MicroBatchOutput, PPOModule
from lightning_rlbatch.modules.base import trained
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.modules.step_sums import ratios
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

TOLERANCE = 1e-10
# (prompt, response) tokens: no response, one token, equal ones, long ones.
SHAPES = [(3, 9), (2, 1), (4, 0), (1, 12), (4, 6), (2, 8), (3, 3), (1, 1), (2, 2), (2, 2), (5, 5), (1, 7), (3, 4), (2, 0), (1, 10), (4, 3)]
LONGEST = 13
CUTS = (1, 2, 4)  # micro-batches of each rank


def squared_ratio(log_probs, old_log_probs, advantages, response_mask, cu_seqlens):
    delta = log_probs - old_log_probs
    return LossTerms(advantages * delta.square(), {"squared_ratio": delta.detach().square()})


LOSSES = {
    "ppo": PPOClip(0.2, 0.28),
    "ppo, dual clip": PPOClip(dual_clip=1.2),
    "ppo, corrected": PPOClip(),
    "gspo": GSPO(0.05, 0.05),
    "gmpo": GMPO(),
    "cispo": CISPO(0.2, 0.2),
    "sapo": SAPO(),
    "dppo, tv": DPPO("tv", 0.001, 0.001),
    "dppo, kl": DPPO("kl", 0.001, 0.001),
    "reinforce": Reinforce(),
    "reinforce, truncated": Reinforce(1.1),
    # Every candidate is chosen: which of more candidates are left out is drawn anew at every step.
    "clip-cov": ClipCov(fraction=1.0, lower=0.3),
    "kl-cov": KLCov(fraction=0.3),
    "user": FunctionLoss(squared_ratio),
}
KL_KINDS = [kind for kind in functional.KL_KINDS if not kind.startswith("full")]  # of log-probs; the others need logits


@dataclasses.dataclass(frozen=True)
class Combination:
    """What one row of the table is trained with."""

    loss: str
    aggregation: str
    kl_kind: str
    value_clip: float | None
    has_value: bool  # the value loss is the same beside every policy loss: it runs beside two of them, clipped and not

    @property
    def settings(self):
        correction = RolloutCorrection() if self.loss == "ppo, corrected" else None
        settings = dataclasses.asdict(self) | {"policy_loss": LOSSES[self.loss], "loss_aggregation": self.aggregation}
        return {name: settings[name] for name in ("policy_loss", "loss_aggregation", "kl_kind", "value_clip")} | {
            "rollout_correction": correction
        }


COMBINATIONS = [
    Combination(loss, mode, KL_KINDS[number % len(KL_KINDS)], 0.2 if number % 2 else None, number < 2)
    for number, loss in enumerate(LOSSES)
    for mode in AGGREGATION_MODES
]


class Table(torch.nn.Module):
    """An offset of each combination for log-prob, entropy and value of each token of each sample."""

    def __init__(self):
        super().__init__()
        self.offsets = torch.nn.Parameter(torch.zeros(len(COMBINATIONS), len(SHAPES), LONGEST, 3, dtype=torch.float64))

    def forward(self, micro_batch):
        samples = micro_batch[SAMPLE_ID][micro_batch.sample_ids_per_token]
        return self.offsets[:, samples, micro_batch.position_ids]


class OffsetScorer(torch.nn.Module):
    """What a frozen scorer returns, plus the offsets of the combination whose turn it is."""

    def __init__(self, scorer):
        super().__init__()
        self.__dict__["scorer"] = scorer  # no child: it is not trained, and whole on every rank
        self.known = {}
        self.offsets = None

    @torch.no_grad()
    def scores(self, micro_batch):
        values = self.scorer.value_head is not None
        key = tuple(micro_batch[SAMPLE_ID].tolist()), micro_batch.num_tokens
        if key not in self.known:
            self.known[key] = self.scorer(micro_batch, with_log_probs=not values, with_entropy=not values, with_values=values)
        return self.known[key]

    def forward(self, micro_batch, **options):
        scores = self.scores(micro_batch)
        if self.offsets is None:
            return scores
        return TokenScores(*(None if own is None else own + offset for own, offset in zip(scores, self.offsets)))


class EveryTerm(PPOModule):
    """Runs every combination on each micro-batch."""

    def __init__(self, remove_padding):
        super().__init__(
            lambda: tiny_llama(dtype=torch.float64),
            [length_reward],
            critic=lambda: tiny_llama(1, dtype=torch.float64),
            advantage=GAE(),
            kl_coefficient=0.1,
            entropy_coefficient=0.05,
            remove_padding=remove_padding,
            optimizer=frozen_sgd,
            max_grad_norm=None,
        )
        self.loss_norm_constant = 20.0
        self.metrics = []

    def build_models(self):
        critic = self._scorer(tiny_llama(1, dtype=torch.float64), value_head=True)
        torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
        self.policy, self.critic, self.table = OffsetScorer(self._scorer(tiny_llama(dtype=torch.float64))), OffsetScorer(critic), Table()

    def optimizer_groups(self):
        return [{"name": "policy", "params": trained(self.table)}]

    def backward_passes(self, batch, denominators):
        self.num_micro_steps = len(batch.micro_batches)
        self.policy.offsets = self.critic.offsets = None
        micro_batches = batch.micro_batches
        for name, loss in LOSSES.items():
            if loss.needs_selection:
                self.policy_loss = loss
                chosen = [micro_batch["selected"] for micro_batch in self._with_selection(batch.micro_batches, denominators)]
                assert sum(int(part.sum()) for part in chosen) > 0
                micro_batches = [
                    micro_batch.with_fields(per_token={name: part}) for micro_batch, part in zip(micro_batches, chosen, strict=True)
                ]
        return [(micro_batches, self.micro_batch_step)]

    def accumulate_gradients(self, batch, denominators):
        sums = super().accumulate_gradients(batch, denominators)
        # As the module itself does it, but for Lightning's log, which takes minutes for a thousand names.
        self.metrics.append(ratios(all_reduce_sums(sums, self.meshes.dp_group)))
        return {name: value for name, value in sums.items() if name.startswith("train/loss")}

    def micro_batch_step(self, micro_batch, denominators):
        offsets, total, sums = self.table(micro_batch), 0.0, {}
        share = micro_batch["response_mask"].sum() / denominators.num_tokens
        for number, combination in enumerate(COMBINATIONS):
            for name, value in combination.settings.items():
                assert hasattr(self, name), name
                setattr(self, name, value)
            self.policy.offsets = self.critic.offsets = offsets[number].unbind(-1)
            chosen = {"selected": micro_batch[combination.loss]} if self.policy_loss.needs_selection else {}
            step = super().micro_batch_step if combination.has_value else self.policy_step
            output = step(micro_batch.with_fields(per_token=chosen), denominators)
            total = total + output.loss
            sums |= {f"{number} {name}": pair for name, pair in output.sums.items()}
            sums[f"{number} loss"] = (output.loss.detach(), share)  # the shares add up to 1
        return MicroBatchOutput(total, sums)


def run(dp, sp, remove_padding):
    """Return the tables' gradients, [cuts, combinations, samples, positions, columns], and the metrics of each cut."""
    torch.set_default_dtype(torch.float64)  # Lightning keeps metrics in the default dtype
    samples = with_policy_log_probs(make_samples(SHAPES), tiny_llama(dtype=torch.float64), noise=0.3)
    weights = torch.rand(samples.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    samples = samples.with_fields(per_token={"loss_weights": weights})
    per_rank = len(SHAPES) // dp
    steps = [Step(BatchingOptions(micro_batch_size=-(-per_rank // cut), equal_size=True, padded=not remove_padding)) for cut in CUTS]
    recorder, module, counts = StepRecorder(), EveryTerm(remove_padding), []
    module.on_train_batch_end = lambda *args: counts.append(module.num_micro_steps)
    trainer = make_trainer(dp * sp, RLBatchFSDPStrategy(sp), max_epochs=1, callbacks=[recorder])
    trainer.fit(module, datamodule=HandMadeDataModule(samples, steps))
    assert counts == list(CUTS)
    return torch.stack([gradients["table.offsets"] for gradients in recorder.gradients]), module.metrics


LAYOUTS = [(dp, sp, padding) for dp in (1, 2, 4) for sp, padding in ((1, False), (1, True), (2, False))]


@pytest.fixture(scope="module")
def results():
    """Every layout, those of one world size in the same forked ranks."""
    found = {}
    for world_size in sorted({dp * sp for dp, sp, _ in LAYOUTS}):
        layouts = [layout for layout in LAYOUTS if layout[0] * layout[1] == world_size]

        def fn(rank, size, layouts=layouts):
            made = {(dp, sp, padded): run(dp, sp, not padded) for dp, sp, padded in layouts}
            # Gradients were gathered: every rank has the same.
            return {layout: (gradients.numpy() if rank == 0 else None, metrics) for layout, (gradients, metrics) in made.items()}

        ranks = run_distributed(fn, world_size, timeout=240.0, init_process_group=False)
        for layout in layouts:
            found[layout] = ranks[0][layout]
            assert all(rank[layout][1] == found[layout][1] for rank in ranks)
    return found


def test_gradient_and_metrics_of_every_combination_are_those_of_one_process_in_every_layout_and_cut(results):
    (expected, *_), (expected_metrics, *_) = results[LAYOUTS[0]]
    largest = numpy.abs(expected).max(axis=(1, 2))  # of each combination and column; without a value loss 0
    for layout, (gradients, metrics) in results.items():
        for cut, own, own_metrics in zip(CUTS, gradients, metrics, strict=True):
            difference = numpy.abs(own - expected).max(axis=(1, 2)) / numpy.maximum(largest, 1e-9)
            worst = numpy.unravel_index(difference.argmax(), difference.shape)
            assert difference.max() < TOLERANCE, (layout, cut, COMBINATIONS[worst[0]], worst[1])
            assert own_metrics == pytest.approx(expected_metrics, rel=TOLERANCE, abs=1e-12), (layout, cut)


def test_every_combination_has_a_gradient_of_its_own(results):
    """Else the test above would compare zeros, or one number with itself."""
    gradients, metrics = results[LAYOUTS[0]]
    largest = numpy.abs(gradients).max(axis=(0, 2, 3))
    assert (largest[:, :2] > 1e-6).all()
    assert [value > 1e-6 for value in largest[:, 2]] == [combination.has_value for combination in COMBINATIONS]
    norms = numpy.linalg.norm(gradients[0, ..., 0].reshape(len(COMBINATIONS), -1), axis=1)
    assert len(set(norms.round(9))) == len(COMBINATIONS)
    assert len(metrics[0]) > 8 * len(COMBINATIONS)


def test_every_public_loss_aggregation_and_estimate_is_among_the_combinations():
    public = {
        cls for cls in vars(functional).values() if inspect.isclass(cls) and issubclass(cls, PolicyLoss) and not inspect.isabstract(cls)
    }
    assert {type(loss) for loss in LOSSES.values()} == public
    valued = {(c.value_clip, c.aggregation) for c in COMBINATIONS if c.has_value}
    assert valued == {(clip, mode) for clip in (None, 0.2) for mode in AGGREGATION_MODES}
    assert {(c.kl_kind, c.aggregation) for c in COMBINATIONS} == {(kind, mode) for kind in KL_KINDS for mode in AGGREGATION_MODES}
