"""Options that no class takes: misspelt ones, those of another section, and other trainers' names."""

import runpy
from pathlib import Path

import pytest
from configs import config, write

from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.config_file import read_config
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.cli.suggestions import places
from lightning_rlbatch.cli.translations import TABLES, translate

DOCS = Path(__file__).parents[2] / "docs"


def refused(path, *overrides):
    explanation = explain(run_config(read_config(["--config", path, *overrides])))
    return [finding.text for finding in explanation.findings if finding.level == "refused"]


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("--model.clip_range=0.2", "PPOModule has no option `clip_range`. Here: `policy_loss: PPOClip(clip_low, clip_high)`."),
        ("--data.ppo_mini_batch_size=4", "That is verl's `actor.ppo_mini_batch_size`; here: `mini_batch_size` - prompts;"),
        ("--actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9", "here: `max_tokens_per_rank` - a hard cap"),
        ("--actor_rollout_ref.rollout.n=9", "That is verl's `rollout.n`; here: `rollouts_per_prompt`. Written data.init_args."),
        ("--actor_rollout_ref.rollout.val_kwargs.n=9", "here: `val_rollouts_per_prompt`"),
        ("--num_generations=8", "TRL's `num_generations`; here: `rollouts_per_prompt`. Written data.init_args.rollouts_per_prompt."),
        ("--per_device_train_batch_size=8", "here: `micro_batch_size`, or better `max_tokens_per_rank`"),
        ("--model.kl_coef=0.1", "Here: `kl_coefficient` - in the loss"),
        ("--model.loss_type=dr_grpo", "here: `loss_aggregation: seq-mean-token-sum-norm` and `loss_norm_constant: "),
        ("--model.loss_type=other", "by its value, `dapo` is `loss_aggregation: token-mean`"),
        ("--data.max_tokens=9", "Here: `max_tokens_per_rank` - of a micro-batch"),
        ("--data.max_tokens_per_gpus=9", "Did you mean `max_tokens_per_rank`?"),
        ("--model.vllm_server_port=80", "TRL's `vllm_server_*`; here: no counterpart"),
        ("--model.mini_batch_size=3", "PPOModule has no option `mini_batch_size`. It is data.init_args.mini_batch_size."),
        ("--data.clip_low=0.1", "It is `clip_low` of PPOClip, which model.init_args.policy_loss takes."),
        ("--data.tempratur=2", "Did you mean model.init_args.temperature?"),
        ("--trainer.max_epoch=3", "Trainer has no option `max_epoch`. Did you mean `max_epochs`?"),
        ("--trainer.n_gpus_per_node=8", "here: `devices`"),
        ("--sed_everything=1", "There is no top-level key `sed_everything`. Did you mean `seed_everything`?"),
    ],
)
def test_a_name_that_no_class_takes_gets_one_error_with_the_nearest_option_or_its_translation(override, answer, tmp_path):
    (text,) = refused(write(tmp_path, config()), override)
    assert answer in text


def test_a_section_of_another_trainer_is_translated_option_by_option_and_the_rest_is_listed(tmp_path):
    content = config() | {"algorithm": {"adv_estimator": "grpo", "gamma": 1.0, "something": {"else": 2}}}
    texts = refused(write(tmp_path, content))
    assert len(texts) == 3
    assert "`algorithm.adv_estimator`. That is verl's" in texts[0]
    assert "`algorithm.gamma`. That is verl's `algorithm.gamma`; here: `GAE(gamma, lam)`" in texts[1]
    assert texts[2] == "There is no top-level key `algorithm`, and nothing here is called something.else: drop them."


def test_an_option_beside_the_arguments_of_its_class_is_told(tmp_path):
    content = config()
    content["data"]["mini_batch_size"] = 4
    (text,) = refused(write(tmp_path, content))
    assert text == "There is no option `data.mini_batch_size`. It is data.init_args.mini_batch_size."


def test_a_misspelt_section_is_one_mistake_and_not_one_for_each_of_its_options(tmp_path):
    content = config()
    content["trianer"] = content.pop("trainer")
    path = write(tmp_path, content)
    assert refused(path).count("There is no top-level key `trianer`. Did you mean `trainer`?") == 1
    told = [finding.text for finding in explain(run_config(read_config(["--confg", path]))).findings if "top-level" in finding.text]
    assert told == ["There is no top-level key `confg`. Did you mean `config`?"]


@pytest.mark.parametrize("command", ["fit", "explain"])
def test_an_argument_in_the_way_of_hydra_is_answered_too(command, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, "--config", write(tmp_path, config()), "actor_rollout_ref.actor.ppo_mini_batch_size=64"])
    error = " ".join(capsys.readouterr().err.split())
    assert "begins with -- but got" in error
    assert "here: `mini_batch_size`" in error


@pytest.mark.parametrize(("command", "more"), [("verify", []), ("plan", ["lengths.txt"])])
def test_commands_that_read_a_part_of_the_configuration_refuse_unknown_names_too(command, more, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command, *more, "--config", write(tmp_path, config()), "--data.mini_batch_sze=4", "--data.num_generations=4"])
    error = " ".join(capsys.readouterr().err.split())
    assert "Did you mean `mini_batch_size`?" in error
    assert "here: `rollouts_per_prompt`" in error


def test_the_page_of_migration_holds_the_tables_of_which_the_answers_are_made():
    page = DOCS / "migration.md"
    assert runpy.run_path(str(DOCS / "make_migration_tables.py"))["filled"](page.read_text()) == page.read_text()
    assert all(TABLES.read(trainer) in page.read_text() for trainer in TABLES.sections)


def test_every_name_of_the_tables_is_answered_with_a_row_about_it():
    for entry in TABLES.entries:
        found = translate(entry.name.replace("*", "x"), entry.value)
        assert found is not None
        assert (found.name, found.value) == (entry.name, entry.value)


def test_all_options_have_a_place_where_they_are_written():
    found = places(run_config(config()))
    assert found["kl_coefficient"] == "model.init_args.kl_coefficient"
    assert found["sequence_parallel_size"] == "trainer.strategy.init_args.sequence_parallel_size"
    assert found["devices"] == "trainer.devices"
    assert found["max_num_seqs"] == "`max_num_seqs` of VLLMEngineConfig, which model.init_args.rollout_engine takes"
