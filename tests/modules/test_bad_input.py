"""Bad input is an error on every rank that names what is wrong, before anybody waits."""

import dataclasses
import time

import pytest
import torch
from hand_made import ConstantLossModule, HandMadeDataModule, ScriptedPPO, Step, constant_sample, prompts
from helpers import ToyTokenizer, length_reward, make_trainer, tiny_llama
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_rlbatch.data import BatchingOptions, RolloutDataModule, SFTDataModule
from lightning_rlbatch.functional import GAE, GDPO, ClipCov, FixedKL, FunctionLoss, PassAtKTraining, PPOClip
from lightning_rlbatch.modules import PPOModule, SFTModule
from lightning_rlbatch.modules.correction import RolloutCorrection
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

SIZES = {"train_batch_size": 4, "mini_batch_size": 2, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 7}


def ppo_data(**options):
    return RolloutDataModule(lambda: prompts("abcd"), ToyTokenizer(), **{"max_tokens_per_rank": 8, **SIZES, **options})


def errors_of(make, world_size=2, strategy="rlbatch_fsdp"):
    """Return type and message of every rank's error; the ranks must not need a timeout to get there."""

    def fn(rank, size):
        start = time.monotonic()
        try:
            module, data = make(rank)
            made = strategy() if callable(strategy) else strategy
            make_trainer(size, made, max_steps=1).fit(module, datamodule=data)
        except Exception as error:
            return type(error), str(error), time.monotonic() - start
        return None, "no error", 0.0

    results = run_distributed(fn, world_size, pg_timeout=60.0, init_process_group=False)
    assert all(seconds < 20 for _, _, seconds in results)
    return [(kind, message) for kind, message, _ in results]


def too_few(prompts, completions):
    return [1.0] * (len(completions) - 1)


def not_a_number(prompts, completions):
    return [float("nan")] * len(completions)


def breaks(prompts, completions):
    raise LookupError("the answer key has no entry for this prompt")


def needs_a_column(completions, solution):
    return [1.0] * len(completions)


def good(prompts, completions):
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (needs_a_column, TypeError, ["'needs_a_column'", "takes solution, but", "completion_ids, completions, prompts"]),
        (too_few, ValueError, ["'too_few'", "3 rewards for 4 completions"]),
        (not_a_number, ValueError, ["'not_a_number'", "nan", "completion 0"]),
        (breaks, LookupError, ["no entry for this prompt"]),
    ],
)
def test_reward_function_that_fails_on_one_rank_only_is_an_error_on_every_rank(bad, kind, words):
    def make(rank):
        reward = bad if rank == 1 else good
        return ScriptedPPO(tiny_llama, [reward]), ppo_data()

    (peer_kind, peer_message), (own_kind, own_message) = errors_of(make)
    assert own_kind is kind
    assert issubclass(peer_kind, RuntimeError)
    assert "Rank 1 failed" in peer_message
    for word in words:
        assert word in own_message
        assert word in peer_message


def test_loss_of_ones_own_that_returns_a_mean_is_refused():
    def mean_loss(log_probs, old_log_probs, advantages, response_mask, cu_seqlens):
        return (-advantages * log_probs).mean()

    def make(rank):
        return ScriptedPPO(tiny_llama, [good], policy_loss=FunctionLoss(mean_loss)), ppo_data()

    for kind, message in errors_of(make):
        assert kind is ValueError
        assert "Policy loss" in message
        assert "one unreduced term per token" in message


def test_world_that_sequence_parallel_size_does_not_divide_is_refused_on_every_rank_with_the_numbers():
    rows = [constant_sample(2, 1.0)]

    def make(rank):
        return ConstantLossModule(), SFTDataModule(rows, mini_batch_size=1, max_tokens_per_rank=8)

    for kind, message in errors_of(make, 2, lambda: RLBatchFSDPStrategy(sequence_parallel_size=3)):
        assert kind is ValueError
        assert "`sequence_parallel_size`=3 must divide the number of ranks, 2" in message


@pytest.mark.parametrize("option", ["sequence_parallel_size", "data_parallel_replicate_size"])
def test_parallel_size_of_zero_is_refused_by_name(option):
    with pytest.raises(ValueError, match=f"{option} to be at least 1 but got 0"):
        RLBatchFSDPStrategy(**{option: 0})


def test_sequence_parallelism_with_padding_is_refused_on_every_rank():
    rows = [{"input_ids": [3, 4, 5], "response_mask": [False, True, True]}]

    def make(rank):
        return SFTModule(tiny_llama, remove_padding=False), SFTDataModule(rows, mini_batch_size=1, max_tokens_per_rank=8)

    for kind, message in errors_of(make, 2, lambda: RLBatchFSDPStrategy(sequence_parallel_size=2)):
        assert kind is ValueError
        assert "sequence_parallel_size=2" in message
        assert "remove_padding" in message


def test_modules_and_data_that_do_not_go_together_are_refused_with_those_that_do():
    rows = [constant_sample(2, 1.0)]

    def make(rank):
        if rank < 0:
            return SFTModule(tiny_llama), ppo_data()
        return PPOModule(tiny_llama, [good]), SFTDataModule(rows, mini_batch_size=1, max_tokens_per_rank=8)

    kind, message = errors_of(make, 1)[0]
    assert kind is TypeError
    assert "PPOModule trains on rollouts, but SFTDataModule has samples. Use RolloutDataModule, or SFTModule." in message
    kind, message = errors_of(lambda rank: make(-1), 1)[0]
    assert kind is TypeError
    assert "RolloutDataModule needs a module with collect_rollouts, such as PPOModule, but got SFTModule" in message


def test_strategy_that_would_scale_gradients_wrongly_is_refused_with_the_name_of_ours():
    rows = [constant_sample(2, 1.0)]

    def make(rank):
        return ConstantLossModule(), SFTDataModule(rows, mini_batch_size=1, max_tokens_per_rank=8)

    for kind, message in errors_of(make, 2, ModelParallelStrategy):
        assert kind is MisconfigurationException
        assert "ModelParallelStrategy" in message
        assert "rlbatch_fsdp" in message


def test_prompt_and_response_longer_than_the_budget_are_refused_before_anything_is_sampled():

    def make(rank):
        return ScriptedPPO(tiny_llama, [good]), ppo_data(max_prompt_length=4)

    for kind, message in errors_of(make):
        assert kind is ValueError
        for words in ("11 tokens", "max_prompt_length=4", "max_response_length=7", "max_tokens_per_rank=8"):
            assert words in message


def test_token_that_a_reward_model_reads_behind_the_response_counts_too():
    def make(rank):
        return ScriptedPPO(tiny_llama, [good], reward_model=tiny_llama), ppo_data()  # the budget is exactly prompt and response

    for kind, message in errors_of(make):
        assert kind is ValueError
        for words in ("9 tokens", "max_response_length=7 + 1 for the reward model", "max_tokens_per_rank=8"):
            assert words in message


def test_prompts_that_differ_between_ranks_are_refused_with_the_first_that_differs():
    def make(rank):
        rows = prompts("abcd" if rank == 0 else "abdc")  # as a source would give that walks through a set
        data = RolloutDataModule(lambda: rows, ToyTokenizer(), **{"max_tokens_per_rank": 8, **SIZES})
        return ScriptedPPO(tiny_llama, [good]), data

    for kind, message in errors_of(make):
        assert kind is RuntimeError
        assert "`train_prompts[2]` is" in message
        assert "reading prompts" in message


def test_samples_that_differ_between_ranks_are_refused_with_the_first_that_differs():
    def make(rank):
        rows = [constant_sample(length, 1.0) for length in (3, 2 + rank, 3)]
        return ConstantLossModule(), SFTDataModule(rows, mini_batch_size=3, max_tokens_per_rank=8)

    for kind, message in errors_of(make):
        assert kind is RuntimeError
        assert "`lengths[1]` is 3 on rank 0 and 4 on rank 1" in message


def test_file_that_one_rank_cannot_read_is_an_error_on_every_rank(tmp_path):
    def make(rank):
        path = tmp_path / f"prompts_of_rank_{rank}.jsonl"
        if rank == 0:
            path.write_text('{"prompt": "a"}\n' * 4)
        return ScriptedPPO(tiny_llama, [good]), RolloutDataModule(str(path), ToyTokenizer(), **{"max_tokens_per_rank": 8, **SIZES})

    (peer_kind, peer_message), (own_kind, _) = errors_of(make)
    assert own_kind is ValueError
    assert issubclass(peer_kind, RuntimeError)
    assert "Rank 1 failed in phase 'reading prompts'" in peer_message


def test_sample_longer_than_the_budget_is_refused_on_every_rank_by_its_number():
    rows = [constant_sample(length, 1.0) for length in (3, 8, 3)]

    def make(rank):
        return ConstantLossModule(), SFTDataModule(rows, mini_batch_size=3, max_tokens_per_rank=8)

    for kind, message in errors_of(make):
        assert kind is ValueError
        assert "Sample 1 has 9 tokens" in message
        assert "max_tokens_per_rank" in message


def test_prompts_longer_than_the_limit_are_counted_in_a_warning_and_it_is_an_error_if_none_is_left():
    data = RolloutDataModule(lambda: [*prompts("a"), {"prompt": "abc"}], ToyTokenizer(), **{"max_tokens_per_rank": 8, **SIZES})
    with pytest.warns(UserWarning, match="1 of 2 rows of train_prompts are left out.*max_prompt_length=1"):
        data.setup("fit")
    data = RolloutDataModule(lambda: [{"prompt": "abc"}], ToyTokenizer(), **{"max_tokens_per_rank": 8, **SIZES})
    with pytest.warns(UserWarning, match="1 of 1 rows"), pytest.raises(ValueError, match="No row of train_prompts is left"):
        data.setup("fit")


@pytest.mark.parametrize(
    "option",
    [field.name for field in dataclasses.fields(BatchingOptions) if field.name.endswith(("_rank", "batch_size"))],
)
@pytest.mark.parametrize("value", [0, -1])
def test_budget_below_one_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=f"Expected {option} to be at least 1 but got {value}"):
        BatchingOptions(**{"max_tokens_per_rank" if "tokens" in option else "micro_batch_size": 8, option: value})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of max_tokens_per_rank and micro_batch_size"),
        ({"max_tokens_per_rank": 8, "micro_batch_size": 2}, "exactly one of max_tokens_per_rank and micro_batch_size"),
        ({"max_tokens_per_rank": 8, "log_prob_micro_batch_size": 2}, "log_prob_micro_batch_size has no effect"),
        ({"micro_batch_size": 8, "log_prob_max_tokens_per_rank": 2}, "log_prob_max_tokens_per_rank has no effect"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        BatchingOptions(**options)


@pytest.mark.parametrize("option", ["train_batch_size", "mini_batch_size", "rollouts_per_prompt", "ppo_epochs", "max_response_length"])
def test_size_of_zero_is_refused_by_name(option):
    with pytest.raises(ValueError, match=f"Expected {option} to be at least 1 but got 0"):
        ppo_data(**{option: 0})


def test_dataloader_of_something_else_is_refused_with_what_to_use():
    class Tensors(HandMadeDataModule):
        def __iter__(self):
            yield torch.zeros(2)

    def make(rank):
        return ConstantLossModule(), Tensors(None, [Step(None)])

    for kind, message in errors_of(make, 1, "auto"):
        assert kind is TypeError
        assert "MiniBatch" in message
        assert "Tensor" in message


@pytest.mark.parametrize("option", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}])
def test_trainer_options_that_manual_optimization_refuses_point_to_ours(option):
    data = SFTDataModule([constant_sample(2, 1.0)], mini_batch_size=1, max_tokens_per_rank=8)
    with pytest.raises(MisconfigurationException, match="max_grad_norm" if "gradient_clip_val" in option else "max_tokens_per_rank"):
        make_trainer(1, "auto", max_steps=1, **option).fit(ConstantLossModule(), datamodule=data)


def test_a_reward_function_given_by_name_in_python_is_refused_at_once():
    with pytest.raises(TypeError, match="Import it and pass the function"):
        PPOModule(tiny_llama, ["my_project.reward"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"reward_functions": length_reward},
            r"must be a list of functions but is <function.*reward_functions=\[length_reward\]",
        ),
        ({"reward_functions": "my_project.reward"}, "must be a list of functions but is 'my_project.reward'"),
        ({"advantage": "GAE"}, r"advantage must be an object such as GRPO\(\) but is 'GAE'"),
        ({"advantage": GAE}, r"advantage must be an object such as GRPO\(\) but is <class"),
        ({"kl_reward": 0.1}, r"kl_reward must be an object such as FixedKL\(0.001\) but is 0.1"),
        ({"rollout_correction": True}, "rollout_correction must be an object such as"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "optimizer must be a function that makes one.*but is a SGD that is made",
        ),
    ],
)
def test_a_name_a_number_or_one_function_in_the_place_of_an_object_or_a_list_is_refused_with_what_to_pass(options, words):
    with pytest.raises(TypeError, match=words):
        PPOModule(tiny_llama, **{"reward_functions": [length_reward], **options})


@pytest.mark.parametrize("kind", ["full", "full+"])
def test_a_full_divergence_in_the_reward_is_refused_with_where_it_can_be(kind):
    with pytest.raises(ValueError, match=r"stored log-probs of sampled tokens(.|\n)*kl_kind"):
        PPOModule(tiny_llama, [length_reward], kl_reward=FixedKL(0.1), kl_reward_kind=kind)


def test_more_tries_than_rollouts_are_refused_before_anything_is_sampled():
    def make(rank):
        return ScriptedPPO(tiny_llama, [length_reward], advantage=PassAtKTraining(k=2)), ppo_data(rollouts_per_prompt=2)

    for kind, message in errors_of(make, 1, "auto"):
        assert kind is ValueError
        assert "needs at least 3 rollouts of a prompt but rollouts_per_prompt is 2" in message


def test_a_kl_penalty_in_the_reward_beside_rewards_normalized_one_by_one_is_refused():
    with pytest.raises(ValueError, match="GDPO normalizes each reward on its own"):
        PPOModule(tiny_llama, [length_reward], advantage=GDPO(), kl_reward=FixedKL(0.1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy_loss": PPOClip(clip_low=-0.1)}, "clip_low and clip_high to be >= 0 but got -0.1"),
        ({"policy_loss": ClipCov(fraction=2.0)}, r"fraction to be in \(0, 1\] but got 2.0"),
        ({"advantage": GAE(gamma=1.5), "critic": tiny_llama}, "gamma to be between 0 and 1 but got 1.5"),
        ({"advantage": GDPO(weights=[1.0, 2.0])}, "one weight for each of 1 rewards"),
        ({"rollout_correction": RolloutCorrection(lower=3.0)}, "lower=3.0 and upper=2.0"),
        ({"critic": tiny_llama, "value_clip": -0.2}, "value_clip to be positive but got -0.2"),
        ({"overlong_buffer": 0}, "overlong_buffer to be positive but got 0"),
        ({"loss_aggregation": "seq-mean-token-sum-norm", "loss_norm_constant": 0.0}, "loss_norm_constant to be positive but got 0.0"),
        ({"kl_coefficient": float("nan")}, "kl_coefficient to be a number, at least 0, but got nan"),
        ({"reward_weights": [float("inf")]}, "weights of rewards to be finite numbers but got inf"),
        ({"reward_model_weight": 2.0}, "reward_model_weight=2.0 has no effect without a reward_model"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"validation_temperature": -1.0}, "validation_temperature to be at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " and ".join(value),
)
def test_a_setting_out_of_range_is_refused_when_the_module_is_made_not_after_its_first_rollouts(options, words):
    with pytest.raises(ValueError, match=words):
        PPOModule(tiny_llama, [length_reward], **options)


def test_stop_iteration_in_a_loss_does_not_pass_for_the_end_of_the_epoch():
    class Exhausted(ConstantLossModule):
        def micro_batch_step(self, micro_batch, denominators):
            return next(iter(()))

    data = SFTDataModule([constant_sample(2, 1.0)], mini_batch_size=1, max_tokens_per_rank=8)
    with pytest.raises(RuntimeError, match="The training step of Exhausted raised StopIteration"):
        make_trainer(1, "auto", max_epochs=1).fit(Exhausted(), datamodule=data)
