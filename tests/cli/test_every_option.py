"""Every option of every public class, set to another value, changes something that can be seen, or is refused.

The walk goes over the signatures: an option that is in no table here fails it. Options are tried in tiny runs on one device whose metrics,
weights, model calls and files are compared; what needs several ranks, or has a file of tests to itself, names the test that shows the
effect.
"""

import ast
import inspect
import logging
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from helpers import length_reward, make_trainer, sgd, tiny_llama
from transformers import LlamaConfig, LlamaForSequenceClassification, LlamaModel

import lightning_rlbatch
from lightning_rlbatch import callbacks, functional, rollout
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.modules.correction import RolloutCorrection

TESTS = Path(__file__).parents[1]


class Letters:
    eos_token_id, pad_token_id = 2, 0

    def __init__(self, shift=4):
        self.shift = shift

    def encode(self, text):
        return [self.shift + ord(letter) - ord("a") for letter in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return " ".join(str(int(token)) for token in token_ids)


def rows(text):
    return [{"prompt": word} for word in text.split()]


def tokens_reward(prompts, completion_ids):
    return [float(sum(ids) % 7) for ids in completion_ids]


def flat_reward(prompts, completions):
    return [1.0] * len(completions)


def reward_model():
    config = LlamaConfig(**{**tiny_llama().config.to_dict(), "num_labels": 1})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForSequenceClassification(config)


def one_more_turn(turns, turn):
    return ["b" if turn < 2 else None] * len(turns)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


class Samples:
    def __init__(self, count=8, offset=0):
        self.count, self.offset = count, offset

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        ids = torch.arange(3 + 2 * (index % 4)) + 3 + self.offset
        return {"input_ids": ids, "response_mask": torch.arange(len(ids)) > 1}


POLICY = {"policy": tiny_llama, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.3)}
MODULES = {
    "PPOModule": {**POLICY, "reward_functions": [tokens_reward]},
    "SFTModule": POLICY,
}
DATA = {
    "RolloutDataModule": {
        "train_prompts": rows("a bc d efg"), "tokenizer": Letters, "train_batch_size": 4, "mini_batch_size": 2, "rollouts_per_prompt": 3,
        "max_tokens_per_rank": 38, "max_prompt_length": 4, "max_response_length": 16, "seed": 0,
    },
    "SFTDataModule": {"train_dataset": Samples(), "mini_batch_size": 4, "max_tokens_per_rank": 20, "seed": 0},
}  # fmt: skip

KL = {"kl_coefficient": 0.5}
CRITIC = {"critic": lambda: tiny_llama(5)}
REWARD_MODEL = {"reward_model": reward_model}
VALIDATION = {"val_prompts": rows("ba c de"), "_validates": True}
ENVIRONMENT = {"environment": one_more_turn}
STATIC = {"max_tokens_per_rank": None, "micro_batch_size": 2}
ENGINES = "rollout/test_engine_config.py::test"
# Class -> option -> the value, and what it needs beside it (compared with a run that has that alone); or the test that shows its effect.
TRIED = {
    "PPOModule": {
        "policy": {"policy": lambda: tiny_llama(1)},
        "reward_functions": {"reward_functions": [length_reward]},
        "reward_weights": {"reward_weights": [2.0]},
        "reward_model": REWARD_MODEL,
        "reward_model_weight": {"reward_model_weight": 3.0, **REWARD_MODEL},
        "advantage": {"advantage": functional.DrGRPO()},
        "policy_loss": {"policy_loss": functional.CISPO()},
        "loss_aggregation": {"loss_aggregation": "seq-mean-token-mean"},
        "loss_norm_constant": {"loss_norm_constant": 5.0, "loss_aggregation": "seq-mean-token-sum-norm"},
        "entropy_coefficient": {"entropy_coefficient": 0.3},
        "kl_coefficient": KL,
        "kl_kind": {"kl_kind": "k2", **KL},
        "kl_reward": {"kl_reward": functional.FixedKL(0.5)},
        "kl_reward_kind": {"kl_reward_kind": "k2", "kl_reward": functional.FixedKL(0.5), "_iterations": 2},
        "rollout_correction": {"rollout_correction": RolloutCorrection()},
        "drop_truncated": {"drop_truncated": True},
        "overlong_buffer": {"overlong_buffer": 4},
        "overlong_factor": {"overlong_factor": 3.0, "overlong_buffer": 4},
        "max_sampling_rounds": {"max_sampling_rounds": 2, "reward_functions": [flat_reward]},
        "critic": CRITIC,
        "critic_lr": {"critic_lr": 1e-3, **CRITIC},
        "value_coefficient": {"value_coefficient": 3.0, **CRITIC},
        "value_clip": {"value_clip": 1e-4, **CRITIC},
        "temperature": {"temperature": 0.5},
        "top_k": {"top_k": 2},
        "top_p": {"top_p": 0.3},
        "stop_token_ids": {"stop_token_ids": [5, 7]},
        "validation_temperature": {"validation_temperature": 0.0, **VALIDATION},
        "answer_function": "modules/test_validation.py::test_rollouts_vote_for_the_answers_that_a_function_finds_on_any_number_of_ranks",
        "rollout_engine": {"rollout_engine": rollout.TransformersEngineConfig(max_batch_size=2)},
        "record_rollouts": {"record_rollouts": "recorded"},
        "rollout_tensor_parallel_size": {"rollout_tensor_parallel_size": 2},
        "environment": ENVIRONMENT,
        "max_turns": {"max_turns": 1, **ENVIRONMENT},
        "remove_padding": {"remove_padding": False},
        "head_memory_mib": "models/test_scoring.py::test_kept_tiles_take_the_memory_they_may_take_and_never_more",
        "optimizer": {"optimizer": sgd},
        "lr_scheduler": {"lr_scheduler": halving},
        "max_grad_norm": {"max_grad_norm": 1e-3},
    },
    "SFTModule": {
        "policy": {"policy": lambda: tiny_llama(1)},
        "remove_padding": {"remove_padding": False},
        "head_memory_mib": "models/test_scoring.py::test_kept_tiles_take_the_memory_they_may_take_and_never_more",
        "loss_aggregation": {"loss_aggregation": "seq-mean-token-mean"},
        "optimizer": {"optimizer": sgd},
        "lr_scheduler": {"lr_scheduler": halving},
        "max_grad_norm": {"max_grad_norm": 1e-3},
    },
    "RolloutDataModule": {
        "train_prompts": {"train_prompts": rows("dd ef a g")},
        "tokenizer": {"tokenizer": lambda: Letters(9)},
        "val_prompts": {"val_prompts": rows("a"), "_validates": True},
        "train_batch_size": {"train_batch_size": 3},
        "mini_batch_size": {"mini_batch_size": 4},
        "rollouts_per_prompt": {"rollouts_per_prompt": 2},
        "ppo_epochs": {"ppo_epochs": 2},
        "max_tokens_per_rank": {"max_tokens_per_rank": 21},
        "micro_batch_size": STATIC,
        "log_prob_max_tokens_per_rank": {"log_prob_max_tokens_per_rank": 100},
        "log_prob_micro_batch_size": {"log_prob_micro_batch_size": 4, **STATIC},
        "critic_max_tokens_per_rank": {"critic_max_tokens_per_rank": 100, **CRITIC},
        "critic_micro_batch_size": {"critic_micro_batch_size": 4, **STATIC, **CRITIC},
        "max_prompt_length": {"max_prompt_length": 2},
        "max_response_length": {"max_response_length": 5},
        "val_batch_size": {"val_batch_size": 1, **VALIDATION},
        "val_rollouts_per_prompt": {"val_rollouts_per_prompt": 2, **VALIDATION},
        "seed": {"seed": 1},
    },
    "SFTDataModule": {
        "train_dataset": {"train_dataset": Samples(offset=1)},
        "val_dataset": {"val_dataset": Samples(4), "_validates": True},
        "mini_batch_size": {"mini_batch_size": 8},
        "max_tokens_per_rank": {"max_tokens_per_rank": 9},
        "micro_batch_size": STATIC,
        "num_workers": "strategies/test_resume.py::test_supervised_training_resumes_exactly_anywhere_in_an_epoch_with_loader_workers",
        "seed": {"seed": 1},
    },
    "ReplayDataModule": {
        "dirpath": "cli/test_explain_sources.py::test_a_folder_to_replay_that_is_not_there_is_refused",
        "mini_batch_size": "data/test_replay.py::test_a_mini_batch_larger_than_the_recorded_iteration_is_an_error",
        "ppo_epochs": "data/test_replay.py::test_options_without_effect_or_out_of_range_are_errors",
        "rescore": "data/test_replay.py::test_recomputed_log_probs_and_advantages_give_the_recorded_losses",
        "tokenizer": "data/test_dumps.py::test_training_on_a_text_dump_is_the_same_on_two_ranks",
        "reward_columns": "data/test_dumps.py::test_trls_completions_have_their_rewards_summed_from_named_columns",
        "append_eos": "data/test_dumps.py::test_trls_completions_have_their_rewards_summed_from_named_columns",
        "seed": "data/test_replay.py::test_another_seed_is_another_run",
    },
    "TransformersEngineConfig": {
        "method": f"{ENGINES}_every_method_of_transformers_samples_the_same_completions_from_a_configuration",
        "max_batch_size": f"{ENGINES}_options_of_the_transformers_engine_arrive",
        "dtype": "rollout/test_weights.py::test_the_engine_may_hold_its_copy_in_half_precision",
        "attn_implementation": f"{ENGINES}_options_of_the_transformers_engine_arrive",
    },
    "ReplayEngineConfig": {"path": "rollout/test_replaying_runs.py::test_a_recorded_run_is_served_again_turn_by_turn_on_any_ranks"},
    "VLLMEngineConfig": dict.fromkeys(
        (
            "model",
            "dtype",
            "gpu_memory_utilization",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
            "sleep_level",
        ),
        f"{ENGINES}_options_of_vllm_arrive_and_its_log_probs_are_over_the_whole_vocabulary",
    ),
    "RLBatchFSDPStrategy": {
        "sequence_parallel_size": "test_invariance.py",
        "data_parallel_replicate_size": "modules/test_bad_input.py::test_parallel_size_of_zero_is_refused_by_name",
        "wrap_cls": "strategies/test_options.py::test_option_leaves_the_trained_weights_as_they_are",
        "reshard_after_forward": "strategies/test_traffic.py::test_bytes_of_a_step_follow_the_formulas",
        "cpu_offload": "strategies/test_options.py::test_option_leaves_the_trained_weights_as_they_are",
        "reference_cpu_offload": "strategies/test_options.py::test_frozen_reference_may_lie_in_host_memory_and_gives_the_same_numbers",
        "activation_checkpointing": "strategies/test_options.py::test_activation_checkpointing_computes_blocks_twice_and_keeps_names",
        "grad_sync": "strategies/test_traffic.py::test_bytes_of_a_step_follow_the_formulas",
        "compile_backend": "strategies/test_options.py::test_blocks_are_compiled_one_by_one_with_the_same_result",
        "save_distributed_checkpoint": "callbacks/test_export.py::test_command_exports_either_kind_of_checkpoint",
        "async_save": "strategies/test_async_save.py",
        "start_method": "strategies/test_options.py::test_fork_starts_the_ranks_from_a_plain_process_and_brings_the_weights_back",
        "check_collectives": "strategies/test_faults.py::test_check_collectives_names_the_first_difference_before_ranks_block",
        "timeout": "strategies/test_options.py::test_every_group_has_the_timeout_of_the_strategy",
    },
    "BalanceMonitor": {
        "dirpath": "callbacks/test_balance_monitor.py",
        "every_n_steps": "callbacks/test_balance_monitor.py",
    },
    "MemoryRehearsal": {"max_sample_length": "callbacks/test_memory_rehearsal.py::test_a_run_with_a_rehearsal_is_the_same_run"},
    "ParityCheck": {"lengths": "callbacks/test_parity_check.py::test_a_policy_with_padding_is_compared_with_padding_only"},
    "PretrainedExport": {"dirpath": "callbacks/test_export.py::test_callback_writes_model_tokenizer_and_generation_config"},
    "RolloutLogger": dict.fromkeys(
        ("dirpath", "file_format", "every_n_iterations", "max_rows", "max_text_length", "num_bins"), "callbacks/test_rollout_logger.py"
    ),
    "RolloutRecorder": dict.fromkeys(("dirpath", "every_n_iterations", "prompt_texts"), "data/test_recording.py"),
    "ThroughputMonitor": dict.fromkeys(("window_size", "available_flops", "waiting_every_n_steps"), "callbacks/test_throughput.py"),
    "TrainingDoctor": dict.fromkeys(("ignore", "strict"), "callbacks/test_doctor.py"),
    "RLBatchModelCheckpoint": dict.fromkeys(
        ("save_top_k", "save_last", "every_n_epochs", "every_n_train_steps", "train_time_interval", "inside_iteration", "monitor"),
        "strategies/test_lightning_counters.py",
    ),
}
SHORTENED = {"sequence_parallel_size", "dirpath"}  # called `sp`, or given by position
REFUSED = {"PPOModule.rollout_tensor_parallel_size"}  # on one device
# What the Trainer sets, Lightning's own arguments, and what only a user's special object or hardware can show.
NOT_TRIED = {
    "RLBatchFSDPStrategy": {
        "accelerator", "parallel_devices", "cluster_environment", "precision_plugin", "process_group_backend", "load_weights_only",
    },
    "RLBatchModelCheckpoint": {"dirpath", "filename", "mode", "save_weights_only", "save_on_exception", "verbose"},
    "ParityCheck": {"tolerance"},
    "TrainingDoctor": {"thresholds"},
}  # fmt: skip
# Options of cutting: `test_options_have_effects.py` shows that they change plans; here, that the data modules hand them on.
HANDED_ON = {
    **{name: name for name in ("max_tokens_per_rank", "micro_batch_size", "log_prob_max_tokens_per_rank", "log_prob_micro_batch_size")},
    **{name: name for name in ("critic_max_tokens_per_rank", "critic_micro_batch_size", "balance", "equal_size", "planner", "oversize")},
    "workload_coefficient": "coefficient",
}
OTHER = {"balance": False, "equal_size": True, "planner": "per_rank", "oversize": "isolate", "workload_coefficient": 5}


def classes():
    names = [name for name in lightning_rlbatch.__all__ if name.endswith(("Module", "DataModule", "Strategy")) and name != "RLBatchModule"]
    found = {name: getattr(lightning_rlbatch, name) for name in names}
    for name in callbacks.__all__:
        value = getattr(callbacks, name)
        if inspect.isclass(value) and issubclass(value, pl.Callback) and name != "RolloutCallback":
            found[name] = value
    return found | {name: getattr(rollout, name) for name in rollout.__all__ if name.endswith("EngineConfig") and name != "EngineConfig"}


def options_of(cls):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, parameter in inspect.signature(cls).parameters.items() if parameter.kind not in kinds}


@pytest.mark.parametrize("name", classes())
def test_the_walk_knows_every_option_and_no_other(name):
    cls = classes()[name]
    handed_on = HANDED_ON.keys() if "data" in cls.__module__ else set()
    known = set(TRIED.get(name, {})) | NOT_TRIED.get(name, set()) | (handed_on & options_of(cls))
    new, gone = options_of(cls) - known, known - options_of(cls)
    assert not new, f"{name} has new options {sorted(new)}: put each into TRIED, with a value that changes something or a test of it."
    assert not gone, f"{name} has no options {sorted(gone)} any more."


def test_every_test_that_is_named_exists_and_sets_the_option():
    for name, options in TRIED.items():
        for option, place in options.items():
            if isinstance(place, str):
                file, _, test = place.partition("::")
                text = (TESTS / file).read_text(encoding="utf-8")
                functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
                assert not test or test in functions, f"{name}.{option}: {place}"
                assert option in text or option in SHORTENED, f"{name}.{option} is not in {place}"


@pytest.mark.parametrize("name", ["RolloutDataModule", "ReplayDataModule", "SFTDataModule"])
def test_options_of_cutting_are_handed_on(name):
    cls = classes()[name]
    required = DATA.get(name, {"dirpath": "x", "mini_batch_size": 2, "max_tokens_per_rank": 9})
    for option in HANDED_ON.keys() & options_of(cls):
        static = {"max_tokens_per_rank": None, "micro_batch_size": 2} if "micro_batch" in option else {}
        made = cls(**{**required, **static, option: OTHER.get(option, 7)})
        assert getattr(made.options, HANDED_ON[option]) == OTHER.get(option, 7), option
    assert set(HANDED_ON.values()) | {"padded"} == set(inspect.signature(BatchingOptions).parameters)


# -- tiny runs -----------------------------------------------------------------------------------------------------------------------


def outcome(name, changes, folder):
    """Return all that can be seen of a run, or the words with which it is refused."""
    settings = {option: changes.get(option) for option in ("_iterations", "_validates")}
    supervised = name.startswith("SFT")
    module_name, data_name = ("SFTModule", "SFTDataModule") if supervised else ("PPOModule", "RolloutDataModule")
    module_class, data_class = getattr(lightning_rlbatch, module_name), getattr(lightning_rlbatch, data_name)
    mine, theirs = dict(MODULES[module_name]), dict(DATA[data_name])
    for option, value in changes.items():
        if not option.startswith("_"):
            (mine if option in options_of(module_class) and option not in options_of(data_class) else theirs)[option] = value
    calls = []
    original = LlamaModel.forward

    def watched(self, input_ids=None, **kwargs):
        calls.append(None if input_ids is None else tuple(input_ids.shape))
        return original(self, input_ids=input_ids, **kwargs)

    validation = {"limit_val_batches": 1.0, "num_sanity_val_steps": 0} if settings["_validates"] else {}
    trainer = make_trainer(1, "auto", max_epochs=settings["_iterations"] or 1, **validation)
    try:
        module = module_class(**mine)
        LlamaModel.forward = watched
        trainer.fit(module, datamodule=data_class(**theirs))
    except (ValueError, TypeError, RuntimeError) as error:
        return f"refused: {error}"
    finally:
        LlamaModel.forward = original
    metrics = [{key: value for key, value in row.items() if not key.startswith(("time/", "perf/"))} for row in trainer.logger.rows]
    weights = [parameter.detach().sum().item() for parameter in module.parameters()]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    return repr((metrics, weights, calls, files))


def beside(name, option):
    """Return what the option is compared with: its companions alone."""
    changes = TRIED[name][option]
    return {} if option == "micro_batch_size" else {other: value for other, value in changes.items() if other != option}


def family(name):
    return "SFT" if name.startswith("SFT") else "PPO"


@pytest.fixture(scope="module")
def quiet():
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


@pytest.fixture(scope="module")
def bases(quiet, tmp_path_factory):
    """Run what options are compared with, each setting once; the plain ones twice, to see that equal runs show the same."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, option in RUNS:
            key = family(name), tuple(sorted(beside(name, option)))
            for _ in range(0 if key in found else 1 if key[1] else 2):
                folder = tmp_path_factory.mktemp("base")
                patch.chdir(folder)
                shown = outcome(name, beside(name, option), folder)
                assert found.setdefault(key, shown) == shown
    return found


RUNS = [(name, option) for name, options in TRIED.items() for option, place in options.items() if not isinstance(place, str)]


@pytest.mark.parametrize(("name", "option"), RUNS, ids=[f"{name}.{option}" for name, option in RUNS])
def test_another_value_changes_what_a_run_shows_or_is_refused(name, option, bases, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a short run with odd settings warns of much
        changed = outcome(name, TRIED[name][option], tmp_path)
    assert changed != bases[family(name), tuple(sorted(beside(name, option)))], f"{name}.{option} changes nothing."
    assert changed.startswith("refused") == (f"{name}.{option}" in REFUSED), changed[:300]
