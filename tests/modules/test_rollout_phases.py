"""What happens around rollouts: the engine's memory, the reference model, rewards of a module's own."""

import itertools

import pytest
import torch
from hand_made import ScriptedEngine, ScriptedPPO, prompts, varied_reward
from helpers import EOS, ToyTokenizer, make_trainer, tiny_llama
from transformers import LlamaForCausalLM

from lightning_rlbatch.callbacks import RolloutCallback
from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.functional import ReMax
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.testing import run_distributed

SIZES = {"train_batch_size": 2, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 7}


def data_module(**options):
    return RolloutDataModule(lambda: prompts("gf"), ToyTokenizer(), **{"max_tokens_per_rank": 8, **SIZES, **options})


class NotingEngine(ScriptedEngine):
    """Notes what it is told to do."""

    def __init__(self):
        self.calls = []

    def generate(self, requests, sampling, on_progress=None):
        self.calls.append("generate")
        return super().generate(requests, sampling, on_progress)

    def update_weights(self, weights):
        super().update_weights(weights)
        self.calls.append("update_weights")

    def sleep(self):
        self.calls.append("sleep")

    def wake(self):
        self.calls.append("wake")


class NotingPPO(ScriptedPPO):
    """PPO that notes its optimizer steps among the engine's calls."""

    def build_engine(self, model):
        return NotingEngine()

    def training_step(self, batch, batch_idx):
        self.rollout_engine.calls.append("step")
        super().training_step(batch, batch_idx)


def test_the_engine_sleeps_while_the_policy_is_scored_and_updated():
    def fn(rank, world_size):
        module = NotingPPO(tiny_llama, [varied_reward], advantage=ReMax())
        data = data_module(val_prompts=lambda: prompts("a"))
        make_trainer(world_size, max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=0).fit(module, datamodule=data)
        return module.rollout_engine.calls

    training = ["wake", "update_weights", "generate", "generate", "sleep", "step"]  # the second time for the greedy baseline
    validation = ["wake", "update_weights", "generate", "sleep"]
    assert run_distributed(fn, 1, init_process_group=False) == [2 * (training + validation)]


def test_the_engine_sleeps_after_an_error_as_well():
    def fail(*args, **options):
        raise OSError("the first error")

    class Breaking(NotingPPO):
        phase = ""

        def build_engine(self, model):
            engine = NotingEngine()
            if self.phase != "rewards":
                setattr(engine, self.phase, fail)
            return engine

        def compute_rewards(self, **told):
            return fail()

    def fn(rank, world_size):
        seen = {}
        for call, phases in {"fit": 3, "validate": 3, "predict": 2}.items():  # predictions are not rewarded
            for phase in ("update_weights", "generate", "rewards")[:phases]:
                module = Breaking(tiny_llama, [varied_reward])
                module.phase = phase
                trainer = make_trainer(world_size, "auto", max_epochs=1, limit_val_batches=1.0, num_sanity_val_steps=0)
                with pytest.raises(OSError, match="the first error"):
                    getattr(trainer, call)(module, datamodule=data_module(val_prompts=lambda: prompts("a")))
                seen[call, phase] = module.rollout_engine.calls
        return seen

    (seen,) = run_distributed(fn, 1, init_process_group=False)
    for calls in seen.values():
        assert (calls[0], calls[-1], calls.count("sleep")) == ("wake", "sleep", 1)


class BreakingEngine(ScriptedEngine):
    """Raises on rank 1 in one of its methods, or takes only two of the weights there."""

    def __init__(self, phase, rank):
        self.phase = phase if rank == 1 else None

    def fail_in(self, phase):
        if phase == self.phase:
            raise OSError(f"no {phase} today")

    def wake(self):
        self.fail_in("wake")

    def update_weights(self, weights):
        taken = [name for name, _ in itertools.islice(weights, 2)]
        self.fail_in("update")
        if self.phase != "leave":
            assert len(taken) + len(list(weights)) == len(list(tiny_llama().parameters()))

    def sleep(self):
        self.fail_in("sleep")


def test_an_engine_that_breaks_on_one_rank_ends_all_with_its_error_and_one_that_leaves_weights_holds_nobody_up():
    def fn(rank, world_size):
        ends = {}
        for phase in ("wake", "update", "sleep", "leave"):
            module = ScriptedPPO(tiny_llama, [varied_reward])
            module.build_engine = lambda model, phase=phase: BreakingEngine(phase, rank)
            try:
                make_trainer(world_size, max_steps=1).fit(module, datamodule=data_module())
                ends[phase] = "trained"
            except Exception as error:
                ends[phase] = str(error)
        return ends

    first, second = run_distributed(fn, 2, init_process_group=False)
    assert second == {"wake": "no wake today", "update": "no update today", "sleep": "no sleep today", "leave": "trained"}
    for phase in ("wake", "update", "sleep"):
        assert first[phase].startswith("Rank 1 failed in phase")
        assert first[phase].endswith(f"OSError: no {phase} today")
    assert first["leave"] == "trained"


def first_token(completion_ids):
    return [float(ids[0]) for ids in completion_ids]


def test_the_greedy_answer_to_a_prompt_is_one_for_all_ranks_and_for_engines_that_look_at_seeds():
    class Baselines(RolloutCallback):
        def on_rollout_end(self, trainer, pl_module, rollouts):
            samples = rollouts.store.samples
            self.seen = dict(zip(samples["sample_id"].tolist(), samples["baseline_reward"].tolist()))

    def fn(rank, world_size):
        baselines = Baselines()
        data = data_module(train_batch_size=3, mini_batch_size=3, rollouts_per_prompt=3, seed=1)  # two ranks share the second
        trainer = make_trainer(world_size, max_epochs=1, callbacks=[baselines])
        trainer.fit(ScriptedPPO(tiny_llama, [first_token], advantage=ReMax()), datamodule=data)
        return baselines.seen

    (alone,) = run_distributed(fn, 1, init_process_group=False)
    assert [len({alone[index] for index in group}) for group in ((0, 1, 2), (3, 4, 5), (6, 7, 8))] == [1, 1, 1]
    first, second = run_distributed(fn, 2, init_process_group=False)
    assert first | second == alone


def random_llama():
    """Other weights at every call."""
    return LlamaForCausalLM(tiny_llama().config)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_reference_is_a_copy_of_the_policy_also_where_its_source_draws_weights_at_random(world_size):
    def fn(rank, world_size):
        torch.manual_seed(7)
        module = ScriptedPPO(random_llama, [varied_reward], kl_coefficient=0.1)
        trainer = make_trainer(world_size, max_steps=1)
        trainer.fit(module, datamodule=data_module())
        return float(trainer.callback_metrics["kl/reference"])

    assert run_distributed(fn, world_size, init_process_group=False) == pytest.approx([0.0] * world_size, abs=1e-6)


def returned(totals, by_name):
    """Return the error of a module whose own compute_rewards returns this for two completions."""

    class Own(ScriptedPPO):
        def compute_rewards(self, **told):
            return totals, by_name

    def fn(rank, world_size):
        data = data_module(train_batch_size=1, mini_batch_size=1)
        with pytest.raises(ValueError, match="compute_rewards") as caught:
            make_trainer(1, max_steps=1).fit(Own(tiny_llama, [varied_reward]), datamodule=data)
        return str(caught.value)

    (text,) = run_distributed(fn, 1, init_process_group=False)
    return text


@pytest.mark.parametrize(
    ("totals", "by_name", "words"),
    [
        ([1.0], {"varied_reward": [1.0, 2.0]}, "1 rewards (in all) for 2 completions"),
        ([1.0, 2.0], {"varied_reward": [1.0]}, "1 rewards (varied_reward) for 2 completions"),
        ([1.0, 2.0], {"mine": [1.0, 2.0]}, "['varied_reward'] in this order, but returned ['mine']"),
        ([1.0, float("inf")], {"varied_reward": [1.0, 2.0]}, "infinite reward (in all)"),
    ],
)
def test_wrong_rewards_of_a_modules_own_are_refused_with_their_numbers(totals, by_name, words):
    assert words in returned(totals, by_name)


def test_a_completion_ends_where_the_configuration_of_a_pretrained_policy_says_or_where_the_user_does(tmp_path):
    model = tiny_llama()
    model.generation_config.eos_token_id = [EOS, 9]
    model.save_pretrained(tmp_path)
    batch = PromptBatch(["a"], [[3]], [{}], [0], 1, 7, ToyTokenizer(), 0)

    def ends(policy, **options):
        return PPOModule(policy, [varied_reward], **options).sampling(batch).stop_token_ids

    assert ends(str(tmp_path)) == (EOS, 9)
    assert ends(str(tmp_path), stop_token_ids=[]) == (EOS,)
    assert ends(str(tmp_path), stop_token_ids=[7, EOS]) == (EOS, 7)
    assert ends(lambda: model) == (EOS,)
    (tmp_path / "generation_config.json").unlink()
    assert ends(str(tmp_path)) == (EOS,)
    for wrong in ([-1], [2.5], 5):
        with pytest.raises(ValueError, match="stop_token_ids to be a list of numbers of tokens, at least 0, but got "):
            ends("a", stop_token_ids=wrong)
