"""What is known of collected rollouts and what of them is trained on: one forward pass per model, statistics of all, losses of some."""

import dataclasses
import tempfile

import pytest
import torch
from hand_made import ScriptedEngine, ScriptedPPO, prompts, varied_reward
from helpers import StepRecorder, ToyTokenizer, make_trainer, sgd, tiny_llama

from lightning_rlbatch.data import ReplayDataModule, RolloutDataModule
from lightning_rlbatch.functional import GAE, GDPO, GRPO, GSPO, OPO, OTB, FixedKL, FunctionLoss, ReMax, group_advantages, opo_advantages
from lightning_rlbatch.functional.segments import segment_sum
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.testing import run_distributed


class Engine(ScriptedEngine):
    """Cuts off every second response; its greedy answers are all 'a'."""

    def generate(self, requests, sampling, on_progress=None):
        completions = super().generate(requests, sampling)
        if sampling.temperature == 0.0:
            return [dataclasses.replace(completion, token_ids=[3] * len(completion.token_ids)) for completion in completions]
        reasons = ("stop", "length")
        return [dataclasses.replace(completion, finish_reason=reasons[place % 2]) for place, completion in enumerate(completions)]


class Recorded(ScriptedPPO):
    """Keeps the rollouts of the last collection, and counts forward passes of the policy's model in it; its reference is made up."""

    def build_engine(self, model):
        return Engine()

    def collect_rollouts(self, *arguments):
        counted = self.policy.backbone.register_forward_hook(lambda *_: self.forwards.append(1))
        self.forwards = []
        self.store = super().collect_rollouts(*arguments)
        counted.remove()
        return self.store

    def scoring_passes(self):
        passes = super().scoring_passes()
        made_up = {"ref_log_probs": lambda micro_batch: -(micro_batch.position_ids % 5).float()}
        return passes | {name: score for name, score in made_up.items() if name in passes}


class WithMethod(Recorded):
    """Has a loss of its own, as a method; collects again with as little as it can say."""

    def policy_loss(self, log_probs, old_log_probs, advantages):
        return mine(log_probs, old_log_probs, advantages)

    def collect_rollouts(self, prompts, iteration, *others):
        assert others
        return super().collect_rollouts(prompts, iteration)


def mine(log_probs, old_log_probs, advantages):
    return -advantages * log_probs


def collect(**options):
    """Return samples, metrics of the first update and the number of forward passes of one iteration of 6 prompts x 2 rollouts."""
    made = options.pop("made", Recorded)
    module = made(tiny_llama, [options.pop("reward", varied_reward)], **{"optimizer": sgd, **options})
    sizes = {"train_batch_size": 6, "mini_batch_size": 6, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 7}
    data = RolloutDataModule(tokenizer=ToyTokenizer(), train_prompts=lambda: prompts("gabgcd"), max_tokens_per_rank=200, **sizes)
    recorder = StepRecorder()
    make_trainer(1, "auto", callbacks=[recorder], max_epochs=1).fit(module, datamodule=data)
    return module.store, recorder.metrics[0], len(module.forwards)


def no_greedy_verdict(prompts, completion_ids):
    """No verdict on the greedy answers to two of the prompts."""
    return [None if set(ids) == {3} and prompt in ("c", "d") else float(sum(ids) % 7) for prompt, ids in zip(prompts, completion_ids)]


def replay(folder, **options):
    """Return metrics of the first update of a run that scores the recorded rollouts again."""
    module, recorder = Recorded(tiny_llama, [varied_reward], optimizer=sgd, **options), StepRecorder()
    data = ReplayDataModule(folder, mini_batch_size=6, max_tokens_per_rank=200, rescore=True)
    make_trainer(1, "auto", callbacks=[recorder], max_epochs=1).fit(module, datamodule=data)
    return recorder.metrics[0]


RUNS = {
    "plain": {},
    "values": {"critic": "shared", "advantage": GAE()},
    "squares": {"advantage": OTB()},
    "squares and values": {"critic": "shared", "advantage": OTB()},
    "own loss": {"policy_loss": FunctionLoss(mine)},
    "own method": {"made": WithMethod},
    "remax": {"advantage": ReMax(), "reward": no_greedy_verdict},
    "truncated": {"advantage": GRPO(), "kl_reward": FixedKL(0.5), "drop_truncated": True},
    "correction": {"advantage": GRPO(), "rollout_correction": RolloutCorrection(mode="mask", upper=0.02, normalize=True)},
    "truncated, lengths": {"advantage": OPO(), "kl_reward": FixedKL(0.5), "drop_truncated": True},
}


def run_all(rank, world_size):
    results = {}
    for name, options in RUNS.items():
        store, metrics, forwards = collect(**options)
        results[name] = (store.samples, store.group_ids, metrics, forwards)
    with tempfile.TemporaryDirectory() as folder:
        options = RUNS["truncated, lengths"]
        collect(**options, record_rollouts=folder)
        results["replays"] = [replay(folder, **options), replay(folder, advantage=OPO())]
    return results


@pytest.fixture(scope="module")
def runs():
    (results,) = run_distributed(run_all, 1, init_process_group=False)
    return results


def test_all_that_one_model_tells_of_rollouts_comes_out_of_one_forward_pass(runs):
    for name in ("plain", "values", "squares", "squares and values"):
        assert runs[name][3] == 1, name
    old = runs["plain"][0]["old_log_probs"]
    for name in RUNS:
        torch.testing.assert_close(runs[name][0]["old_log_probs"], old, msg=name)
    mask, squares = (runs["squares"][0][name] for name in ("response_mask", "sum_pi_squared"))
    assert squares[mask].gt(0).all()
    assert squares[mask].ge(old[mask].exp().square() - 1e-6).all()  # one of the terms of the sum
    torch.testing.assert_close(runs["squares and values"][0]["sum_pi_squared"], squares)


def test_every_loss_reports_the_ratio_one_of_a_users_own_too(runs):
    for name in RUNS:
        assert runs[name][2]["train/ratio"] == pytest.approx(1.0, abs=1e-5), name
        assert abs(runs[name][2]["train/approx_kl"]) < 1e-5, name


def test_a_loss_may_be_a_method_and_rollouts_may_be_collected_without_saying_how_they_are_cut(runs):
    samples, _, metrics, _ = runs["own method"]
    assert torch.equal(samples["input_ids"], runs["own loss"][0]["input_ids"])
    assert metrics["train/policy_loss"] == pytest.approx(runs["own loss"][2]["train/policy_loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"WithMethod defines policy_loss itself, so that policy_loss=GSPO.* would have no effect"):
        WithMethod(tiny_llama, [varied_reward], policy_loss=GSPO())
    with pytest.raises(TypeError, match=r"Wrap a function: FunctionLoss\(my_loss\)"):
        PPOModule(tiny_llama, [varied_reward], policy_loss=mine)


def test_rollouts_without_a_baseline_are_not_trained_on(runs):
    samples, _, metrics, _ = runs["remax"]
    trained = segment_sum(samples["response_mask"], samples.cu_seqlens) > 0
    prompt_tokens = samples["input_ids"][samples.cu_seqlens[:-1].long()]
    assert trained.tolist() == [token not in ToyTokenizer().encode("cd") for token in prompt_tokens.tolist()]
    assert metrics["train/num_sequences"] == 8


def test_rewards_and_lengths_of_responses_left_out_of_the_loss_count_in_their_group(runs):
    for name, compare in (
        ("truncated", lambda outcomes, groups, lengths: group_advantages(outcomes, groups)),
        ("truncated, lengths", opo_advantages),
    ):
        samples, groups, metrics, _ = runs[name]
        sampled, bounds = samples["sampled_mask"], samples.cu_seqlens
        assert metrics["train/num_sequences"] == 6
        assert samples["response_mask"].equal(sampled & ~samples["truncated"][samples.sample_ids_per_token])
        penalty = torch.where(sampled, samples["old_log_probs"] - samples["ref_log_probs"], 0).double()
        outcomes = samples["reward"] - 0.5 * segment_sum(penalty, bounds)
        expected = compare(outcomes, groups, segment_sum(sampled, bounds)).advantages[samples.sample_ids_per_token]
        found = samples["advantages"].double()
        torch.testing.assert_close(found, torch.where(samples["response_mask"], expected, 0), rtol=1e-4, atol=1e-5)
        assert found.abs().max() > 0.1


def test_rollouts_recorded_without_some_tokens_are_scored_again_with_all_of_them(runs):
    with_filter, without = runs["replays"]
    assert with_filter["train/loss"] == pytest.approx(runs["truncated, lengths"][2]["train/loss"], rel=1e-4, abs=1e-6)
    assert with_filter["train/num_sequences"] == 6
    assert without["train/num_sequences"] == 12


def test_the_effective_sample_size_of_the_correction_counts_tokens_left_out_as_lost(runs):
    samples, groups, metrics, _ = runs["correction"]
    sampled, weights = samples["sampled_mask"], samples["loss_weights"].double()
    assert 0 < samples["response_mask"].sum() < sampled.sum()
    expected = float(weights.sum() ** 2 / (sampled.sum() * weights.square().sum()))
    assert metrics["rollout_correction/effective_sample_size"] == pytest.approx(expected, rel=1e-5)
    assert metrics["rollout_correction/importance_clipped"] == pytest.approx(1 - float(samples["response_mask"].sum() / sampled.sum()))
    assert float(weights[samples["response_mask"]].mean()) == pytest.approx(1.0, rel=1e-5)
    advantages = group_advantages(samples["reward"], groups).advantages[samples.sample_ids_per_token]
    torch.testing.assert_close(samples["advantages"].double(), torch.where(samples["response_mask"], advantages, 0), rtol=1e-5, atol=1e-6)


def test_options_that_rewards_compared_one_by_one_would_ignore_are_refused():
    for options, words in (
        ({"overlong_buffer": 2}, "the overlong penalty, which is added to their sum, would have no effect"),
        ({"reward_weights": [0.5]}, r"reward_weights=\[0.5\] would have no effect on it. Set the advantage's weights to \[0.5\]"),
        ({"reward_model": tiny_llama, "reward_model_weight": 2.0}, r"Set the advantage's weights to \[1.0, 2.0\]"),
    ):
        with pytest.raises(ValueError, match=words):
            PPOModule(tiny_llama, [varied_reward], advantage=GDPO(), **options)
    PPOModule(tiny_llama, [varied_reward], advantage=GDPO(weights=[0.5]), reward_weights=[0.5])
