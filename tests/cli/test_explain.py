import dataclasses
import json
import random
import subprocess
import sys
import time

import pytest
from configs import RUN, config, write

import lightning_rlbatch
from lightning_rlbatch import functional
from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.config_file import ConfigFileError, read_config
from lightning_rlbatch.cli.digest import layers, summary
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.memory import describe
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.distributed.mesh import single_process_meshes

STATIC = {"max_tokens_per_rank": ..., "micro_batch_size": 2}
# Option -> how it is mis-set, what becomes of it, and a word of the reason. All rows of DESIGN.md's table of options are here.
MIS_SET = {
    "micro_batch_size": ({"data": {"micro_batch_size": 4}}, "refused", "Exactly one"),
    "log_prob_micro_batch_size": ({"data": {"log_prob_micro_batch_size": 4}}, "refused", "set log_prob_max_tokens_per_rank instead"),
    "log_prob_max_tokens_per_rank": (
        {"data": {**STATIC, "log_prob_max_tokens_per_rank": 9000}},
        "refused",
        "set log_prob_micro_batch_size",
    ),
    "critic_max_tokens_per_rank": ({"data": {"critic_max_tokens_per_rank": 2048}}, "refused", "needs a critic"),
    "critic_micro_batch_size": ({"data": {"critic_micro_batch_size": 2}}, "refused", "set critic_max_tokens_per_rank instead"),
    "max_tokens_per_rank": ({"data": {"max_tokens_per_rank": 400}}, "refused", "Raise max_tokens_per_rank to 512"),
    "remove_padding": (
        {"model": {"remove_padding": False}, "strategy": {"sequence_parallel_size": 2}},
        "refused",
        "sequence_parallel_size=2 shards packed tokens",
    ),
    "sequence_parallel_size": ({"strategy": {"sequence_parallel_size": 5}}, "refused", "Use a divisor of 4, or 5 ranks."),
    "planner": ({"data": {"planner": "best"}}, "refused", "one of 'global', 'per_rank'"),
    "equal_size": ({"data": {"equal_size": True, "balance": False}}, "without effect", "contiguous block"),
    "oversize": ({"data": {**STATIC, "oversize": "isolate"}}, "without effect", "no token budget"),
    "max_batch_size": (
        {"model": {"rollout_engine": {"class_path": "TransformersEngineConfig", "init_args": {"max_batch_size": 500}}}},
        "without effect",
        "at most 32 rollouts",
    ),
    "mini_batch_size": ({"data": {"mini_batch_size": 17}}, "refused", "train_batch_size=16"),
    "data_parallel_replicate_size": ({"strategy": {"data_parallel_replicate_size": 3}}, "refused", "data-parallel ranks, 4"),
}


def states(content):
    return {option.option: option for option in explain(run_config(content)).options}


def test_a_sound_configuration_has_nothing_refused_and_nothing_without_effect():
    explanation = explain(run_config(config()))
    assert [finding for finding in explanation.findings if finding.level != "note"] == []
    assert {option.state for option in explanation.options} <= {"in effect", "off"}


@pytest.mark.parametrize("option", MIS_SET)
def test_a_mis_set_option_is_told_from_those_in_effect_and_the_reason_says_what_to_do(option):
    changes, state, reason = MIS_SET[option]
    found = states(config(**changes))[option]
    assert (found.state, reason in found.why) == (state, True), found.why


def test_a_misspelt_option_of_a_loss_or_a_callback_is_refused():
    loss = {"class_path": "lightning_rlbatch.functional.PPOClip", "init_args": {"clip_lw": 0.1, "clip_high": 0.3}}
    content = config(model={"policy_loss": loss})
    content["trainer"]["callbacks"] = [{"class_path": "lightning_rlbatch.callbacks.PretrainedExport", "init_args": {"dirpat": "x"}}]
    texts = [finding.text for finding in explain(run_config(content)).findings if finding.level == "refused"]
    assert texts == [
        "PPOClip has no option `clip_lw`. Did you mean `clip_low`?",
        "PretrainedExport has no option `dirpat`. Did you mean `dirpath`?",
    ]


@pytest.mark.parametrize("option", ["equal_size", "oversize"])
def test_an_option_said_to_be_without_effect_changes_no_plan(option):
    changed = MIS_SET[option][0]["data"]
    options = {name: value for name, value in {"max_tokens_per_rank": 1024, **changed}.items() if value is not ...}
    lengths = [random.Random(0).randrange(2, 513) for _ in range(33)]
    meshes = dataclasses.replace(single_process_meshes(), dp_size=4)
    with_it, without = BatchingOptions(**options), BatchingOptions(**{name: value for name, value in options.items() if name != option})
    plan = with_it.plan(lengths, meshes)
    assert plan.assignment == without.plan(lengths, meshes).assignment
    scoring = [made.recut(lengths, plan.samples_per_rank, meshes, role="log_prob").assignment for made in (with_it, without)]
    assert scoring[0] == scoring[1]


@pytest.mark.parametrize("option", ["micro_batch_size", "log_prob_micro_batch_size", "log_prob_max_tokens_per_rank", "mini_batch_size"])
def test_what_explain_refuses_the_data_module_refuses_too(option):
    arguments = config(**MIS_SET[option][0])["data"]["init_args"]
    with pytest.raises(ValueError, match=option):
        lightning_rlbatch.RolloutDataModule(**arguments)


BAD_MODULES = {
    "reward_weights": {"reward_weights": [1.0, 2.0]},
    "reward_functions": {"reward_functions": []},
    "max_sampling_rounds": {"max_sampling_rounds": 2, "reward_model": "some/judge"},
    "values": {"advantage": {"class_path": "lightning_rlbatch.functional.GAE"}},
    "temperature": {"temperature": 0.0},
    "loss_aggregation": {"loss_aggregation": "mean"},
    "loss_norm_constant": {"loss_norm_constant": 5.0},
    "kl_kind": {"kl_kind": "k9", "kl_coefficient": 0.1},
    "kl_reward_kind": {"kl_reward_kind": "full", "kl_reward": {"class_path": "lightning_rlbatch.functional.FixedKL"}},
    "kl_coefficient": {"kl_coefficient": -1.0},
    "critic_lr": {"critic_lr": 1e-5},
    "max_turns": {"max_turns": 2},
    "head_memory_mib": {"head_memory_mib": -1.0},
    "max_sampling_rounds to be": {"max_sampling_rounds": 0},
}


@pytest.mark.parametrize("words", BAD_MODULES)
def test_what_the_module_refuses_explain_refuses_too(words):
    made = {name: made_of(value) for name, value in BAD_MODULES[words].items()}
    with pytest.raises(ValueError, match=words.partition(" ")[0]):
        lightning_rlbatch.PPOModule(**{"policy": "some/model", "reward_functions": [max], **made})
    assert explain(run_config(config(model=BAD_MODULES[words]))).refused


def made_of(value):
    return getattr(functional, value["class_path"].rpartition(".")[2])() if isinstance(value, dict) else value


def test_all_errors_are_reported_at_once_and_the_exit_code_is_1(tmp_path, capsys):
    broken = config(
        data={"mini_batch_size": 17, "max_tokens_per_rank": 150, "ppo_mini_batch_size": 3}, strategy={"sequence_parallel_size": 3}
    )
    with pytest.raises(SystemExit) as stop:
        main(["explain", "--config", write(tmp_path, broken), "--json"])
    assert stop.value.code == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    refused = [finding["text"] for finding in answer["findings"] if finding["level"] == "refused"]
    assert len(refused) == 4
    assert any("verl's `actor.ppo_mini_batch_size`; here: `mini_batch_size`" in text for text in refused)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"max_token_per_rank": 5}}, "Did you mean `max_tokens_per_rank`"),
        ({"data": {"ppo_max_token_len_per_gpu": 5}}, "verl's `actor.ppo_max_token_len_per_gpu`; here: `max_tokens_per_rank`"),
        ({"data": {"train_batch_size": "many"}}, "must be an integer but is 'many'"),
        ({"data": {"train_batch_size": ...}}, "needs `train_batch_size`"),
        ({"data": {"planner": "best"}}, "one of 'global', 'per_rank'"),
        ({"data": {"rollouts_per_prompt": 0}}, "at least 1 but is 0"),
        ({"data": {"balance": 1}}, "true or false"),
        ({"model": {"kl_coefficient": -1.0}}, "at least 0 but is -1.0"),
        ({"strategy": {"sequence_parallel": 2}}, "Did you mean `sequence_parallel_size`"),
    ],
)
def test_a_wrong_name_type_or_combination_is_refused_by_name(change, message):
    texts = [finding.text for finding in explain(run_config(config(**change))).findings if finding.level == "refused"]
    assert any(message in text for text in texts), texts


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"model": {"value_coefficient": 0.1}}, "value_coefficient"),
        ({"model": {"kl_kind": "k2"}}, "kl_kind"),
        ({"data": {"val_rollouts_per_prompt": 4}}, "val_rollouts_per_prompt"),
        ({"model": {"policy_loss": {"class_path": "lightning_rlbatch.functional.PPOClip", "init_args": {"clip_low": 0.1}}},
          "data": {"mini_batch_size": 16}}, "clip_low"),
    ],
)  # fmt: skip
def test_an_option_without_the_one_it_belongs_to_is_without_effect(change, option):
    findings = explain(run_config(config(**change))).findings
    assert option in [name for finding in findings if finding.level == "without effect" for name in finding.options]


@pytest.mark.parametrize("key", ["gradient_clip_val", "accumulate_grad_batches"])
def test_what_lightning_refuses_under_manual_optimization_is_refused_with_our_own_option(key):
    content = config()
    content["trainer"][key] = 4
    (finding,) = [finding for finding in explain(run_config(content)).findings if finding.level == "refused"]
    assert ("max_grad_norm" if key == "gradient_clip_val" else "mini_batch_size") in finding.text


def test_the_numbers_of_the_three_layers_are_those_of_the_worked_example():
    content = config(
        data={"train_batch_size": 128, "mini_batch_size": 32, "rollouts_per_prompt": 8, "ppo_epochs": 2, **STATIC, "micro_batch_size": 4},
        strategy={"sequence_parallel_size": 2},
    )
    sizes = explain(run_config(content, world_size=16)).sizes
    rank = sizes.rank
    assert [rank.generated_per_gpu, rank.rollouts, rank.samples_per_step] == [(64, 64), (128, 128), (32, 32)]
    assert sizes.micro_batch.num_micro_steps == (8, 8)
    assert sizes.global_batch.num_optimizer_steps == 8
    shown = layers(sizes)
    assert list(shown) == ["global batch", "data-parallel rank", "micro-batch"]
    assert shown["global batch"]["optimizer steps per iteration"] == "8 = 4 mini-batches x 2 PPO epochs"
    assert shown["data-parallel rank"]["rollouts generated by each GPU"] == "64"


def test_programs_get_numbers_and_people_the_same_numbers_in_sentences(tmp_path, capsys):
    path = write(tmp_path, config(data={"mini_batch_size": 5, "rollouts_per_prompt": 7}))
    main(["explain", "--config", path, "--json"])
    answer = json.loads(capsys.readouterr().out)
    sizes = answer["sizes"]
    assert sizes["global_batch"]["rollouts"] == 112
    assert sizes["global_batch"]["rollouts_per_mini_batch"] == {"smallest": 7, "largest": 35}
    assert sizes["rank"]["samples_per_step"] == {"smallest": 1, "largest": 9}
    assert sizes["micro_batch"]["num_micro_steps"] == {"smallest": 1, "largest": 5}
    assert answer["tokens_per_gpu"] == sizes["micro_batch"]["max_tokens"] == 1024
    main(["explain", "--config", path])
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("= 112 rollouts", "7 to 35 rollouts make one optimizer step", "about 1 to 9 rollouts", "runs 1 to 5 of them"):
        assert words in shown


def test_the_summary_says_how_many_samples_of_how_many_tokens_one_gpu_runs_at_once():
    assert "at most 1024 tokens at once: 2 samples of the longest 512 tokens" in summary(explain(run_config(config())))
    refused = config(data={"max_tokens_per_rank": 500})
    assert "at most 500 tokens at once, fewer than a sample of the longest 512 has." in summary(explain(run_config(refused)))
    refused["data"]["init_args"]["oversize"] = "isolate"
    assert "at most 512 tokens at once: 1 sample of the longest 512 tokens" in summary(explain(run_config(refused)))
    static = summary(explain(run_config(config(data=STATIC))))
    assert "runs 2 samples at once" in static
    assert "1024 tokens on one GPU" in static


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"mini_batch_size": 5}}, ["last one of 1", "mini_batch_size=4"]),
        ({"data": {"mini_batch_size": 1, "rollouts_per_prompt": 2}}, ["2 of them run fillers", "Raise mini_batch_size to 2"]),
        ({"data": {"rollouts_per_prompt": 1, "train_batch_size": 5}}, ["a rank has 1 or 2", "multiple of 4"]),
    ],
)
def test_what_does_not_divide_is_a_sentence_with_the_fix(change, words):
    notes = [finding.text for finding in explain(run_config(config(**change))).findings if finding.level == "note"]
    assert any(all(word in text for word in words) for text in notes), notes


def test_the_coefficient_is_without_effect_where_nothing_is_balanced_and_nothing_scored():
    content = config()
    content["data"] = {
        "class_path": "lightning_rlbatch.SFTDataModule",
        "init_args": {"train_dataset": "x", "mini_batch_size": 32, "max_tokens_per_rank": 64, "balance": False, "workload_coefficient": 7},
    }
    assert states(content)["workload_coefficient"].state == "without effect"
    content["data"]["init_args"]["planner"] = "per_rank"  # cuts each block by load
    assert states(content)["workload_coefficient"].state == "in effect"


def test_memory_counts_the_weights_of_a_local_model_and_divides_them_over_the_ranks_that_shard_it(tmp_path):
    import helpers

    model = helpers.tiny_llama()
    model.save_pretrained(tmp_path / "model")
    number = sum(parameter.numel() for parameter in model.parameters())
    content = config(model={"policy": str(tmp_path / "model"), "kl_coefficient": 0.1})
    memory = explain(run_config(content)).memory
    assert (memory.num_parameters, memory.counted) == (number, "files")
    parts = {describe(part): part.size for part in memory.parts}
    assert parts["policy: parameters (fp32)"] == number  # 4 bytes, 4 ranks
    assert parts["policy: gradients (fp32)"] == 4 * number  # whole until the last micro-batch
    assert parts["policy: AdamW states (fp32 x 2)"] == 2 * number
    assert parts["rollout engine: its own whole copy (fp32)"] == 4 * number
    assert parts["reference: parameters (fp32)"] == number
    content["trainer"]["strategy"]["init_args"] = {"grad_sync": "every", "cpu_offload": True, "activation_checkpointing": True}
    content["model"]["init_args"]["rollout_engine"] = {"class_path": "TransformersEngineConfig", "init_args": {"dtype": "bfloat16"}}
    saving = explain(run_config(content)).memory
    parts = {describe(part): part.size for part in saving.parts}
    assert parts["rollout engine: its own whole copy (16 bit)"] == 2 * number
    assert parts["policy: gradients (fp32), in host memory"] == number
    assert saving.states == 2 * number + number  # the engine's copy and the reference stay on the device
    assert saving.update < memory.update
    content["model"]["init_args"] |= {"rollout_engine": "VLLMEngineConfig", "rollout_tensor_parallel_size": 2}
    shared = explain(run_config(content)).memory  # vLLM's `auto` is 16 bit
    assert number in [part.size for part in shared.parts if part.what == "its share of a copy on 2 ranks"]
    assert shared.notes[-1].startswith("gpu_memory_utilization: while it samples vLLM takes up to 40%")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert explain(run_config(content)).memory.num_parameters == number  # the formula agrees with the files


def test_more_sequence_parallel_ranks_than_heads_is_refused_from_the_models_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2, "num_key_value_heads": 1}))
    content = config(model={"policy": str(tmp_path)}, strategy={"sequence_parallel_size": 4})
    texts = [finding.text for finding in explain(run_config(content)).findings if finding.level == "refused"]
    assert any("needs at least 4 attention heads but the model has 2" in text for text in texts)


def test_overrides_are_read_as_lightning_cli_reads_them(tmp_path):
    path = write(tmp_path, config())
    merged = read_config(
        ["--config", path, "--data.init_args.mini_batch_size=8", "--data.seed", "3", "--model.kl_coefficient=1e-3",
         "--trainer.strategy.sequence_parallel_size=2", "--model.init_args.reward_functions+=other.reward", "--trainer.devices", "8"]
    )  # fmt: skip
    assert merged["data"]["init_args"]["mini_batch_size"] == 8
    assert merged["data"]["init_args"]["seed"] == 3
    assert merged["model"]["init_args"]["kl_coefficient"] == 1e-3
    assert merged["model"]["init_args"]["reward_functions"] == ["examples.scenarios.rewards.move_share", "other.reward"]
    run = run_config(merged)
    assert (run.world_size, run.sp_size) == (8, 2)


def test_a_named_strategy_takes_overrides_and_a_later_file_wins(tmp_path):
    content = config()
    content["trainer"]["strategy"] = "rlbatch_fsdp"
    first = write(tmp_path, content)
    second = tmp_path / "second.yaml"
    second.write_text("trainer: {devices: [0, 1]}\ndata: {init_args: {ppo_epochs: 2}}\n")
    run = run_config(read_config(["-c", first, "--config", str(second), "--trainer.strategy.sequence_parallel_size=2"]))
    assert (run.world_size, run.sp_size, run.sharded, run.data.get("ppo_epochs")) == (2, 2, True, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "missing.yaml"], "no configuration file missing.yaml"),
        ([], "No configuration given"),
        (["data"], "begins with --"),
        (["run.yaml"], "begins with -- but got 'run.yaml'. Write --config run.yaml"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_an_error_with_its_name(arguments, message):
    with pytest.raises(ConfigFileError, match=message):
        read_config(arguments)


def test_a_users_subclass_is_known_by_its_source_and_inherits_our_options(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "raise RuntimeError('imported')\nimport lightning_rlbatch\nfrom lightning_rlbatch import RolloutDataModule\n"
        "class Data(RolloutDataModule):\n    def __init__(self, extra: int = 3, **kwargs):\n        super().__init__(**kwargs)\n"
        "class Model(lightning_rlbatch.PPOModule):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    content = config(data={"extra": 5, "wrong": 1})
    content["data"]["class_path"], content["model"]["class_path"] = "mine.Data", "mine.Model"
    run = run_config(content)
    assert run.kind == "rollouts"
    assert "PPOModule" in run.model.ancestors
    assert [finding.options for finding in explain(run).findings if finding.level == "refused"] == [("wrong",)]


def test_explain_answers_without_importing_torch_and_within_three_seconds(tmp_path):
    code = (
        "import sys\nfrom lightning_rlbatch.cli import main\nmain(sys.argv[1:])\n"
        "print([name for name in ('torch', 'lightning', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "explain", "--config", write(tmp_path, RUN), "--world-size", "64"]
    seconds = []
    while not seconds or (seconds[-1] >= 3 and len(seconds) < 5):  # again if the machine was busy
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        seconds.append(time.perf_counter() - start)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "64 ranks" in done.stdout
    assert min(seconds) < 3


def test_fit_refuses_a_configuration_with_all_its_errors_before_it_loads_anything(tmp_path, capsys):
    broken = write(tmp_path, config(data={"mini_batch_size": 17, "max_tokens_per_rank": 400}))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", broken])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "2 errors:" in error
    assert "train_batch_size=16" in error
    assert "Raise max_tokens_per_rank to 512" in error


@pytest.mark.parametrize(
    "arguments", [["fit", "--help"], ["fit", "--model.help", "lightning_rlbatch.PPOModule"], ["fit", "--print_config"]]
)
def test_a_question_to_lightning_cli_is_passed_on_unchecked(arguments, monkeypatch):
    asked = []
    monkeypatch.setattr("lightning_rlbatch.cli.lightning_cli.run", asked.append)
    main(arguments)
    assert asked == [arguments]


def test_fit_warns_once_of_options_without_effect_and_goes_on(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("lightning_rlbatch.cli.lightning_cli.run", asked.append)
    path = write(tmp_path, config(data={"equal_size": True, "balance": False, "val_rollouts_per_prompt": 4}))
    with pytest.warns(UserWarning, match="Options without effect: equal_size: .*val_rollouts_per_prompt: ") as warned:
        main(["fit", "--config", path])
    assert len(warned) == 1
    assert len(asked) == 1
