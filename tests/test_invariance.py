"""The flagship: gradient and metrics of an optimizer step do not depend on how its mini-batch was cut or spread.

Seven samples of all kinds (one response token, no response token, a long one) go through the real Trainer, modules, exchange and
planner in fp64, for every layout (ranks, sequence parallelism, padding, strategy) and cut; everything must equal one process that
runs all samples at once, and that one must equal formulas written down here for each sample alone. ``test_invariance_of_terms.py`` has
every loss under every aggregation.
"""

import dataclasses

import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples, with_policy_log_probs
from helpers import StepRecorder, frozen_sgd, length_reward, make_trainer, relative_difference, tiny_llama

from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import CISPO, DPPO, GAE, GMPO, GSPO, SAPO, ClipCov, KLCov, PolicyLoss, PPOClip, Reinforce
from lightning_rlbatch.modules import PPOModule, SFTModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

SHAPES = [(3, 9), (2, 1), (5, 0), (1, 20), (4, 6), (2, 13), (3, 3)]  # (prompt, response) tokens
TOLERANCE = 1e-10
LONGEST = 21
ALL_AT_ONCE = BatchingOptions(micro_batch_size=7)


class SquaredRatio(PolicyLoss):
    """A user's own loss: per-token terms and a metric."""

    def compute(self, inputs):
        return inputs.advantages * (inputs.log_probs - inputs.old_log_probs).square()


# -- the cases: what is trained ------------------------------------------------------------------------------------------------------

BASE = {"entropy_coefficient": 0.01, "kl_coefficient": 0.1, "kl_kind": "k3", "value_clip": 0.2, "loss_norm_constant": None}
PPO_CASES = {
    "ppo": BASE | {"policy_loss": PPOClip(0.2, 0.28), "loss_aggregation": "token-mean"},
    "gspo": BASE | {"policy_loss": GSPO(), "loss_aggregation": "seq-mean-token-mean", "kl_kind": "k1"},
    "user loss": BASE | {"policy_loss": SquaredRatio(), "loss_aggregation": "seq-mean-token-sum", "kl_kind": "k2"},
    "gmpo": BASE | {"policy_loss": GMPO(), "loss_aggregation": "seq-mean-token-sum-norm", "loss_norm_constant": 20.0},
    "cispo": BASE | {"policy_loss": CISPO(), "loss_aggregation": "token-sum", "value_clip": None, "kl_kind": "abs"},
    "sapo": BASE | {"policy_loss": SAPO(), "loss_aggregation": "token-mean", "entropy_coefficient": 0.0},
    "dppo": BASE | {"policy_loss": DPPO(), "loss_aggregation": "seq-mean-token-mean"},
    "reinforce": BASE | {"policy_loss": Reinforce(), "loss_aggregation": "seq-mean-token-sum"},
    # Every candidate is chosen: which of more candidates are left out is drawn anew at every step.
    "clip-cov": BASE | {"policy_loss": ClipCov(fraction=1.0, lower=0.3), "loss_aggregation": "token-mean"},
    "kl-cov": BASE | {"policy_loss": KLCov(fraction=0.3), "loss_aggregation": "seq-mean-token-mean"},
    "full kl": BASE | {"kl_kind": "full", "policy_loss": Reinforce(), "loss_aggregation": "token-mean", "entropy_coefficient": 0.0},
    "full kl, straight through": BASE | {"kl_kind": "full+", "policy_loss": Reinforce(), "loss_aggregation": "seq-mean-token-mean"},
}
SFT_CASES = {name: {"loss_aggregation": name} for name in ("token-mean", "seq-mean-token-mean")}

# -- the cuts: how one mini-batch is laid out --------------------------------------------------------------------------------------------

CUTS = {
    "small budget": BatchingOptions(max_tokens_per_rank=LONGEST),
    "large budget": BatchingOptions(max_tokens_per_rank=200),
    "1 sample": BatchingOptions(micro_batch_size=1),
    "2 samples": BatchingOptions(micro_batch_size=2),
    "7 samples": ALL_AT_ONCE,
    "per-rank planner": BatchingOptions(max_tokens_per_rank=LONGEST, planner="per_rank"),
    "critic of its own budget": BatchingOptions(max_tokens_per_rank=30, critic_max_tokens_per_rank=LONGEST),
    "not balanced": BatchingOptions(max_tokens_per_rank=LONGEST, balance=False),
    "equal sizes": BatchingOptions(max_tokens_per_rank=32, equal_size=True),
}
ORDERS = {"reversed": [6, 5, 4, 3, 2, 1, 0], "shuffled": [3, 0, 6, 2, 5, 1, 4]}


def fixture_samples():
    return with_policy_log_probs(make_samples(SHAPES), tiny_llama(dtype=torch.float64), noise=0.3)


def poisoned(samples):
    """NaN and infinity wherever the policy sampled nothing, in every field that is a number."""
    fields = {}
    for index, (name, values) in enumerate(samples.per_token.items()):
        if values.is_floating_point():
            fields[name] = torch.where(samples["response_mask"], values, [float("nan"), float("inf"), float("-inf")][index % 3])
    assert len(fields) >= 5
    return samples.with_fields(per_token=fields)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a run is spread; ``max_tokens_per_rank`` is divided by ``sp`` so that every layout holds the same samples."""

    world_size: int
    strategy: str = "fsdp"
    sp: int = 1
    replicas: int = 1
    remove_padding: bool = True

    @property
    def name(self):
        extras = [f"sp {self.sp}"] * (self.sp > 1) + ["hsdp"] * (self.replicas > 1) + ["padded"] * (not self.remove_padding)
        return " ".join([f"{self.world_size} x {self.strategy}", *extras])

    def make_strategy(self):
        if self.strategy != "fsdp":
            return self.strategy
        return RLBatchFSDPStrategy(self.sp, self.replicas)

    def options(self, options):
        return dataclasses.replace(options, padded=not self.remove_padding)


LAYOUTS = [
    Layout(1, "auto"),
    Layout(1, "auto", remove_padding=False),
    Layout(1),
    Layout(2),
    Layout(2, remove_padding=False),
    Layout(2, sp=2),
    Layout(2, "ddp"),
    Layout(4),
    Layout(4, sp=2),
    Layout(4, replicas=2),
]
REFERENCE = LAYOUTS[0]
SHARE_A_TRUNK = (Layout(1, "auto"), Layout(2), Layout(2, "ddp"), Layout(4, sp=2))

KINDS = {"ppo": PPO_CASES, "sft": SFT_CASES, "shared trunk": {case: PPO_CASES[case] for case in ("ppo", "full kl")}}
FEW_CUTS = ("small budget", "1 sample", "not balanced", "critic of its own budget")
EVERY_CUT = EVERY_CASE = (Layout(1, "auto"), Layout(1, "auto", remove_padding=False), Layout(2))  # the others are slow on two cores
FEW_CASES = ("ppo", "gspo", "kl-cov", "full kl", "full kl, straight through", *SFT_CASES)


def plan_of_steps(layout, kind, samples):
    """Name to step: the first case in every cut and order, other cases in the smallest cut."""
    cases = KINDS[kind]
    first = next(iter(cases))
    cuts = [cut for cut, options in CUTS.items() if kind == "ppo" or not options.cuts_critic]
    if layout not in EVERY_CUT:
        cuts = [cut for cut in cuts if cut in FEW_CUTS]
    steps = {f"{first}, {cut}": Step(layout.options(CUTS[cut]), cases[first]) for cut in cuts}
    smallest = layout.options(CUTS["small budget"])
    steps |= {f"{first}, {order}": Step(smallest, cases[first], order=members) for order, members in ORDERS.items()}
    steps[f"{first}, poisoned"] = Step(smallest, cases[first], samples=poisoned(samples))
    chosen = [case for case in cases if case in FEW_CASES or layout in EVERY_CASE]
    steps |= {f"{case}, small budget": Step(smallest, cases[case]) for case in chosen}
    if layout == REFERENCE:
        steps |= {f"{case}, 7 samples": Step(ALL_AT_ONCE, settings) for case, settings in cases.items()}
    return steps


class OtherReference(PPOModule):
    """Its reference is not the policy at the start of the run, so that their divergence is not 0."""

    def build_models(self):
        super().build_models()
        reference = tiny_llama(5, dtype=torch.float64).requires_grad_(False)
        self._frozen["reference"] = self._scorer(reference).eval()


def make_module(kind, layout):
    if kind == "sft":
        return SFTModule(lambda: tiny_llama(dtype=torch.float64), remove_padding=layout.remove_padding, optimizer=frozen_sgd)
    return OtherReference(
        lambda: tiny_llama(dtype=torch.float64),
        [length_reward],
        critic="shared" if kind == "shared trunk" else lambda: tiny_llama(1, dtype=torch.float64),
        advantage=GAE(),
        kl_coefficient=0.1,
        kl_kind="full",  # so that the models can; a step may have another kind
        remove_padding=layout.remove_padding,
        optimizer=frozen_sgd,
    )


def kinds_of(layout):
    return [kind for kind in KINDS if kind != "shared trunk" or layout in SHARE_A_TRUNK]


def run_kind(layout, kind):
    """Return for each step: gradients and metrics."""
    samples = fixture_samples()
    steps = plan_of_steps(layout, kind, samples)
    recorder = StepRecorder()
    trainer = make_trainer(layout.world_size, layout.make_strategy(), max_epochs=1, callbacks=[recorder])
    trainer.fit(make_module(kind, layout), datamodule=HandMadeDataModule(samples, list(steps.values())))
    # A metric that a step does not have is logged as NaN; a NaN that should be a number shows as a name that is missing.
    metrics = [{name: x for name, x in row.items() if not name.startswith(("balance/", "perf/")) and x == x} for row in recorder.metrics]
    return dict(zip(steps, zip(recorder.gradients, metrics, strict=True), strict=True))


@pytest.fixture(scope="module")
def results():
    """Run a layout once, on forked ranks; every rank must report the same metrics and gradients."""
    cache = {}

    def run_layout(layout):
        torch.set_default_dtype(torch.float64)  # Lightning keeps metrics in the default dtype
        return {kind: run_kind(layout, kind) for kind in kinds_of(layout)}

    def run(layout, kind):
        if layout not in cache:
            ranks = run_distributed(lambda *_: run_layout(layout), layout.world_size, timeout=240.0, init_process_group=False)
            for other in ranks[1:]:
                for own, (name, (gradients, metrics)) in ((own, step) for own, steps in ranks[0].items() for step in steps.items()):
                    assert metrics == other[own][name][1], f"{own}, {name}: ranks report different metrics"
                    assert relative_difference(other[own][name][0], gradients) == 0, f"{own}, {name}: ranks hold different gradients"
            cache[layout] = ranks[0]
        return cache[layout][kind]

    return run


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(layout, kind) for layout in LAYOUTS for kind in kinds_of(layout)],
    ids=lambda value: getattr(value, "name", value),
)
def test_gradient_and_metrics_are_those_of_one_process_for_every_cut(layout, kind, results):
    reference = results(REFERENCE, kind)
    for name, (gradients, metrics) in results(layout, kind).items():
        expected_gradients, expected_metrics = reference[f"{name.rsplit(', ', 1)[0]}, 7 samples"]
        assert relative_difference(gradients, expected_gradients) < TOLERANCE, name
        assert relative_difference(metrics, expected_metrics) < TOLERANCE, name


def test_the_cases_differ_from_each_other(results):
    """Else the test above would compare one number with itself."""
    reference = results(REFERENCE, "ppo")
    norms = {case: reference[f"{case}, 7 samples"][1]["train/grad_norm/policy"] for case in PPO_CASES}
    assert len({round(norm, 6) for norm in norms.values()}) == len(norms)
    assert all(norm > 1e-3 for norm in norms.values())


# -- the same numbers from formulas written down for each sample alone ------------------------------------------------------------------


def plain_distributions(model, samples):
    """Yield for each sample the log-distribution [L-1, V] that its tokens 1.. were drawn from."""
    for ids in samples.split_per_sample("input_ids"):
        yield model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1].log_softmax(-1)


def test_supervised_loss_and_gradient_equal_the_formula_of_each_sample_alone(results):
    samples, model = fixture_samples(), tiny_llama(dtype=torch.float64)
    ids, masks = samples.split_per_sample("input_ids"), samples.split_per_sample("response_mask")
    losses = [
        -(logs.gather(1, row[1:, None]).squeeze(1))[mask[1:]] for logs, row, mask in zip(plain_distributions(model, samples), ids, masks)
    ]
    expected = {
        "token-mean": sum(terms.sum() for terms in losses) / sum(len(terms) for terms in losses),
        "seq-mean-token-mean": sum(terms.mean() for terms in losses if len(terms)) / 6,
    }
    for case, loss in expected.items():
        gradients, metrics = results(REFERENCE, "sft")[f"{case}, 7 samples"]
        assert metrics["train/loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
        own = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)))
        assert relative_difference(gradients, {f"policy.model.{name}": value for name, value in own.items()}) < TOLERANCE


def test_ppo_loss_and_gradient_equal_the_formula_of_each_sample_alone(results):
    samples, model = fixture_samples(), tiny_llama(dtype=torch.float64)
    total, count, entropies, kl = 0.0, 0, 0.0, 0.0
    columns = [samples.split_per_sample(n) for n in ("input_ids", "response_mask", "old_log_probs", "ref_log_probs", "advantages")]
    for logs, row, mask, old, ref, advantages in zip(plain_distributions(model, samples), *columns):
        chosen = mask[1:].nonzero().flatten()
        for place in chosen.tolist():
            log_prob, entropy = logs[place, row[place + 1]], -(logs[place].exp() * logs[place]).sum()
            ratio = (log_prob - old[place + 1]).exp()
            objective = torch.minimum(ratio * advantages[place + 1], ratio.clamp(0.8, 1.28) * advantages[place + 1])
            gap = ref[place + 1] - log_prob
            penalty = gap.exp() - gap - 1
            total = total - objective - 0.01 * entropy + 0.1 * penalty
            count, entropies, kl = count + 1, entropies + entropy.item(), kl + penalty.item()
    # The critic's head starts at zero: every value is 0, and the loss is clipped around the old values.
    mask = samples["response_mask"]
    old_values, returns = samples["values"][mask], samples["returns"][mask]
    clipped = old_values + (0 - old_values).clamp(-0.2, 0.2)
    value_terms = 0.5 * torch.maximum(returns.square(), (clipped - returns).square())
    gradients, metrics = results(REFERENCE, "ppo")["ppo, 7 samples"]
    assert count == metrics["train/num_tokens"] == 52
    assert metrics["train/loss"] == pytest.approx((total.item() + 0.5 * value_terms.sum().item()) / 52, rel=TOLERANCE)
    assert metrics["train/entropy"] == pytest.approx(entropies / 52, rel=TOLERANCE)
    assert metrics["kl/reference"] == pytest.approx(kl / 52, rel=TOLERANCE)
    own = dict(zip(dict(model.named_parameters()), torch.autograd.grad(total / 52, list(model.parameters()))))
    policy = {name: value for name, value in gradients.items() if name.startswith("policy.")}
    assert relative_difference(policy, {f"policy.model.{name}": value for name, value in own.items()}) < TOLERANCE
    norm = torch.cat([value.flatten() for value in own.values()]).norm().item()
    assert metrics["train/grad_norm/policy"] == pytest.approx(norm, rel=TOLERANCE)


def test_full_divergence_and_its_gradient_equal_the_sum_over_the_vocabulary_of_each_sample_alone(results):
    samples, model = fixture_samples(), tiny_llama(dtype=torch.float64)
    other = tiny_llama(5, dtype=torch.float64).requires_grad_(False)
    total, divergences = 0.0, []
    columns = [samples.split_per_sample(name) for name in ("input_ids", "response_mask", "advantages")]
    for logs, ref, row, mask, advantages in zip(plain_distributions(model, samples), plain_distributions(other, samples), *columns):
        chosen = mask[1:]
        divergence = (logs.exp() * (logs - ref)).sum(-1)[chosen]
        log_probs = logs.gather(1, row[1:, None]).squeeze(1)[chosen]
        total = total + (0.1 * divergence - advantages[1:][chosen] * log_probs).sum()
        divergences.append(divergence.detach())
    gradients, metrics = results(REFERENCE, "ppo")["full kl, 7 samples"]
    assert torch.cat(divergences).mean() > 0.1
    assert metrics["kl/reference"] == pytest.approx(torch.cat(divergences).mean().item(), rel=TOLERANCE)
    own = dict(zip(dict(model.named_parameters()), torch.autograd.grad(total / 52, list(model.parameters()))))
    policy = {name: value for name, value in gradients.items() if name.startswith("policy.")}
    assert relative_difference(policy, {f"policy.model.{name}": value for name, value in own.items()}) < TOLERANCE
