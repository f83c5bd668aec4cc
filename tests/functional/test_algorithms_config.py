"""Losses, estimators and controllers written in YAML, as the command line reads them."""

import dataclasses
import importlib
import inspect
import re

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from lightning_rlbatch.functional import algorithms, estimators_group
from lightning_rlbatch.functional.algorithms import GSPO, FunctionLoss, PolicyLoss, PPOClip
from lightning_rlbatch.functional.estimators import GAE, AdvantageEstimator
from lightning_rlbatch.functional.estimators_group import GDPO
from lightning_rlbatch.functional.kl import AdaptiveKL, FixedKL, KLController

LOSSES = "lightning_rlbatch.functional.algorithms"
ESTIMATORS = "lightning_rlbatch.functional.estimators"


class Holder:
    """Stand for a LightningModule."""

    def __init__(
        self,
        loss: PolicyLoss = PPOClip(),
        estimator: AdvantageEstimator = GAE(),
        kl: KLController = FixedKL(),
    ) -> None:
        self.loss, self.estimator, self.kl = loss, estimator, kl


def parse(text: str) -> Holder:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Holder, "module")
    return parser.instantiate(parser.parse_object({"module": yaml.safe_load(text)})).module


def mean_of_log_probs(log_probs, old_log_probs, advantages, response_mask, cu_seqlens):
    return -log_probs.mean()


def test_class_paths_and_settings_become_objects():
    holder = parse(
        f"""
        loss: {{class_path: {LOSSES}.GSPO, init_args: {{clip_low: 0.01, clip_high: 0.02}}}}
        estimator: {{class_path: {ESTIMATORS}_group.GDPO, init_args: {{weights: [1.0, 0.5]}}}}
        """
    )
    assert holder.loss == GSPO(clip_low=0.01, clip_high=0.02)
    assert holder.estimator == GDPO(weights=[1.0, 0.5])


def test_defaults_need_no_entry():
    assert parse("{}").loss == PPOClip()


def test_an_adaptive_controller_can_stand_where_a_fixed_one_is_the_default():
    holder = parse("kl: {class_path: lightning_rlbatch.functional.kl.AdaptiveKL, init_args: {coefficient: 0.01, target: 0.2}}")
    assert holder.kl == AdaptiveKL(coefficient=0.01, target=0.2)


def test_a_users_function_is_named_by_its_import_path_and_its_mean_is_refused():
    holder = parse(f"loss: {{class_path: {LOSSES}.FunctionLoss, init_args: {{function: {__name__}.mean_of_log_probs}}}}")
    assert isinstance(holder.loss, FunctionLoss)
    one = torch.ones(2)
    with pytest.raises(ValueError, match="one unreduced term per token"):
        holder.loss(one, one, one, one.bool(), torch.tensor([0, 2]))


def test_a_misspelt_setting_is_refused():
    with pytest.raises(Exception, match="clip_hihg"):
        parse(f"loss: {{class_path: {LOSSES}.PPOClip, init_args: {{clip_hihg: 0.3}}}}")


@pytest.mark.parametrize("module", [algorithms, estimators_group])
def test_every_algorithm_is_a_frozen_dataclass_with_defaults(module):
    kinds = [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == module.__name__ and dataclasses.is_dataclass(x)]
    assert len(kinds) >= 9
    for kind in kinds:
        if kind.__name__ in ("LossInputs", "FunctionLoss"):
            continue
        with pytest.raises(dataclasses.FrozenInstanceError):
            kind().anything = 1


SOURCES = [
    "advantages",
    "advantages_group",
    "pass_at_k",
    "optimal_token_baseline",
    "losses",
    "losses_token",
    "losses_sequence",
    "losses_covariance",
    "kl",
    "value",
]
SOURCES += ["importance", "filters", "aggregation", "algorithms", "estimators", "estimators_group"]
# No formula of a paper: sums, shapes, checks, containers.
TOOLS = {
    "place_rewards", "token_sums", "spread_to_tokens", "moments", "as_rewards", "as_group_ids", "group_statistics",
    "call_loss", "HasTerms", "result_dtype", "absolute",
    "policy_loss", "log_ratio", "ratio_metrics", "clip_metrics", "check_clip_bounds", "check_per_token", "needs_logits",
    "effective_sample_size_sums", "LossTerms", "LossInputs", "PolicyLoss", "FunctionLoss", "Advantages", "AdvantageInputs",
    "AdvantageEstimator", "OutcomeEstimator", "SampleAdvantages", "GroupStatistics", "ImportanceCorrection", "ZeroVariance",
    "Denominators", "KLController", "FixedKL",
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_every_algorithm_names_its_source_with_the_year(name):
    module = importlib.import_module(f"lightning_rlbatch.functional.{name}")
    public = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__ and key[0] != "_"}
    assert public
    silent = [key for key, value in public.items() if key not in TOOLS and not re.search(r"\b(19|20)\d\d\b", inspect.getdoc(value) or "")]
    assert not silent
