import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hand_made import HandMadeDataModule, Step, make_samples, with_policy_log_probs
from helpers import length_reward, make_trainer, tiny_llama

from lightning_rlbatch.callbacks import Thresholds, TrainingDoctor, UnhealthyTraining
from lightning_rlbatch.callbacks.doctor_history import History
from lightning_rlbatch.callbacks.doctor_rules import RULES, diagnose
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.functional import PolicyLoss
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

# Metrics of real runs of the Tower of Hanoi example: name -> column -> one value per iteration.
COLUMNS = json.loads((Path(__file__).parents[1] / "data" / "doctor_runs.json").read_text())
RUNS = {
    name: [dict(zip(run, row)) for row in zip(*run.values())]
    for name, run in ((name, {key: value for key, value in run.items() if key != "settings"}) for name, run in COLUMNS.items())
}
SHAPES = [(1, 9), (2, 8), (3, 5), (1, 3)]


def first_seen(iterations):
    """Return when each rule first fired as the run went on."""
    seen, history = {}, History()
    for number, metrics in enumerate(iterations):
        history.add(metrics)
        for found in diagnose(history, Thresholds()):
            seen.setdefault(found.name, number)
    return seen


def healthy(**changes):
    return {
        "train/entropy": 0.3,
        "reward/mean": 0.5,
        "length/mean": 20.0,
        "length/truncated": 0.01,
        "train/approx_kl": 0.001,
        "train/clip_fraction_low": 0.01,
        "train/clip_fraction_high": 0.01,
        "reward/zero_variance_all_right": 0.1,
        "reward/zero_variance_all_wrong": 0.1,
        "train/grad_norm/policy": 0.5,
        "train/skipped_steps": 0.0,
        "kl/rollout_mismatch": 1e-6,
        "value/explained_variance": 0.4,
        "first_ratio": 1.0,
        **changes,
    }


# Thresholds were chosen on the runs without a seed in their names and on collapse and sound runs of seeds 11 and 12; seeds 13, 14 and 21
# to 23 were run afterwards. One was changed then, the speed of entropy, which was too close to that of sound runs.
@pytest.mark.parametrize("run", [name for name in RUNS if name.startswith(("sound", "partial credit without"))])
def test_a_sound_run_has_no_diagnosis(run):
    assert first_seen(RUNS[run]) == {}


# The one collapses slowly, and the other one answers with the longest responses at first.
LATE = {"entropy collapse": 13, "reward hacking, seed 22": 15}


@pytest.mark.parametrize(
    ("kind", "rule", "latest"),
    [
        ("entropy collapse", "entropy_collapse", 9),
        ("reward hacking", "reward_hacking_by_length", 12),
        ("high learning rate, few rollouts", "zero_variance_groups", 36),
        ("high learning rate, few rollouts", "starving_prompts", 55),
    ],
)
def test_every_run_that_went_wrong_is_diagnosed_while_it_goes_wrong(kind, rule, latest):
    runs = [name for name in RUNS if name.startswith(kind)]
    assert len(runs) >= 3
    for name in runs:
        assert first_seen(RUNS[name]).get(rule, math.inf) <= LATE.get(name, latest), name


@pytest.mark.parametrize(
    ("rule", "changes", "words"),
    [
        ("first_ratio", {"first_ratio": 1.02}, "1.02000, not 1"),
        ("entropy_collapse", {"train/entropy": 0.004}, "0.0040 nats"),
        ("entropy_collapse", {"train/entropy": 0.1, "train/approx_kl": 0.02}, "the KL of an update is 20% of what is left"),
        ("reward_hacking_by_length", {"length/mean": 6.0}, "from 20 to 6 tokens"),
        ("kl_blow_up", {"train/approx_kl": 0.4}, "KL of an update is 0.400"),
        ("kl_blow_up", {"kl/reference": 3.0}, "reference model is 3.00"),
        ("engine_mismatch", {"kl/rollout_mismatch": 0.02}, "0.02 (above 0.001)"),
        ("clip_fraction", {"train/clip_fraction_low": 0.2, "train/clip_fraction_high": 0.15}, "35% of the tokens"),
        ("zero_variance_groups", {"reward/zero_variance_all_wrong": 0.85}, "too hard"),
        ("zero_variance_groups", {"reward/zero_variance_all_right": 0.85}, "too easy"),
        ("truncation", {"length/truncated": 0.6}, "60% of the responses"),
        ("skipped_steps", {"train/skipped_steps": 1.0}, "100% of the optimizer steps"),
        ("useless_critic", {"value/explained_variance": -0.5}, "explains -0.50"),
    ],
)
def test_each_rule_fires_on_its_own_sign_alone_with_numbers_and_advice(rule, changes, words):
    iterations = [healthy()] * 10 + [healthy(**changes)] * 12
    found = diagnose(History(iterations), Thresholds())
    assert [diagnosis.name for diagnosis in found] == [rule]
    assert words in str(found[0])
    assert found[0].advice.endswith(".")


def test_a_healthy_run_fires_nothing_and_one_bad_iteration_is_no_trend():
    assert diagnose(History([healthy()] * 30), Thresholds()) == []
    bad = {"train/approx_kl": 0.2, "length/truncated": 0.6, "train/clip_fraction_low": 0.5}
    assert diagnose(History([healthy()] * 20 + [healthy(**bad)]), Thresholds()) == []


def test_longer_responses_with_better_rewards_are_no_finding_but_without_them_they_are():
    start = [healthy()] * 6
    assert diagnose(History(start + [healthy(**{"length/mean": 60.0, "reward/mean": 0.9})] * 6), Thresholds()) == []
    (found,) = diagnose(History(start + [healthy(**{"length/mean": 60.0, "reward/mean": 0.3})] * 6), Thresholds())
    assert found.name == "reward_hacking_by_length"


def test_missing_metrics_and_nan_leave_the_rules_silent():
    assert diagnose(History([{}] * 10), Thresholds()) == []
    assert diagnose(History([dict.fromkeys(healthy(), math.nan)] * 10), Thresholds()) == []


def test_the_memory_of_a_run_does_not_grow_with_it_and_goes_on_in_another_process():
    size = {}
    history = History()
    for number in range(1, 1001):
        history.add(healthy(**{"reward/mean": math.sin(number), "train/approx_kl": 0.4 if number > 990 else 0.001}))
        size[number] = len(json.dumps(history.state_dict()))
    assert size[1000] <= 1.02 * size[100]
    restored = History()
    restored.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for found in (history, restored):
        found.add(healthy(**{"train/approx_kl": 0.4}))
    said = [list(map(str, diagnose(found, Thresholds()))) for found in (history, restored)]
    assert said[0] == said[1]
    assert said[0][0].startswith("kl blow up at iteration 1000")


# -- in a run ------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class PlainTerms(PolicyLoss):
    """A user's own loss, which knows nothing of ratios."""

    def compute(self, inputs):
        return -inputs.advantages * inputs.log_probs


def run(world_size, doctor, *, off=0.5, **options):
    """Train on samples whose old log-probs are off by so much, so that the first ratio is not 1; called on forked ranks."""
    samples = with_policy_log_probs(make_samples(SHAPES), tiny_llama(dtype=torch.float64), noise=off)
    trainer = make_trainer(world_size, max_epochs=2, callbacks=[doctor])
    module = PPOModule(lambda: tiny_llama(dtype=torch.float64), [length_reward], optimizer=lambda p: torch.optim.SGD(p, lr=0.0), **options)
    trainer.fit(module, datamodule=HandMadeDataModule(samples, [Step(BatchingOptions(max_tokens_per_rank=30))] * 2))
    return trainer.logger.rows


def lenient():
    return TrainingDoctor(ignore=["kl_blow_up", "clip_fraction"])


def test_a_diagnosis_is_warned_of_once_while_it_lasts_counted_in_the_log_and_kept_in_checkpoints():
    def fn(rank, world_size):
        doctor, restored = lenient(), lenient()
        with pytest.warns(UserWarning, match="TrainingDoctor: first ratio at iteration 0") as warned:
            rows = run(world_size, doctor)
        restored.load_state_dict(doctor.state_dict())
        run(world_size, restored)  # no second warning: warnings are errors here
        return sum("TrainingDoctor" in str(warning.message) for warning in warned), rows, doctor.diagnoses, restored.diagnoses

    ((num_warnings, rows, diagnoses, later),) = run_distributed(fn, 1, init_process_group=False)
    assert num_warnings == 1
    assert [(found.name, found.iteration) for found in diagnoses] == [("first_ratio", 0)]
    assert [row["doctor/num_findings"] for row in rows if "doctor/num_findings" in row] == [1.0, 1.0]
    assert later == []


def test_a_ratio_of_1_is_no_finding_and_strict_mode_stops_all_ranks_together():
    def fn(rank, world_size):
        doctor = TrainingDoctor()
        run(world_size, doctor, off=0.0)
        with pytest.raises(UnhealthyTraining, match="first ratio at iteration 0"):
            run(world_size, TrainingDoctor(strict=True), policy_loss=PlainTerms())
        return doctor.diagnoses

    assert run_distributed(fn, 2, init_process_group=False) == [[], []]


def test_an_unknown_rule_to_ignore_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"nothing.*first_ratio"):
        TrainingDoctor(ignore=["nothing"])
    assert set(RULES) >= {"entropy_collapse", "kl_blow_up", "truncation"}
