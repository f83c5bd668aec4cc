"""What a configuration names outside itself, and what the first screen of ``explain`` holds."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys

import pytest
from configs import config, write

from lightning_rlbatch.cli import main, rules_short_names
from lightning_rlbatch.cli.digest import layers
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.data.prompt_reading import load_tokenizer


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with the user's modules, from which the command is run."""
    (tmp_path / "my_rewards.py").write_text(
        "import statistics\nWEIGHTS = [1, 2]\nfirst = statistics.fmean\ndef exact(prompts, completions):\n    return []\n"
        "raise RuntimeError('imported')\n"
    )
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\ndef reward():\n    pass\n")
    (tmp_path / "broken.py").write_text("def reward(:\n")
    (tmp_path / "my_engines.py").write_text("from lightning_rlbatch import PPOModule\nclass Spanning(PPOModule):\n    pass\n")
    (tmp_path / "my_models.py").write_text(
        "import helpers\n\ndef build():\n    model = helpers.tiny_llama()\n    model.lm_head.requires_grad_(False)\n    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_models", None)


def refused(content):
    return [finding.text for finding in explain(run_config(content)).findings if finding.level == "refused"]


@pytest.mark.parametrize("name", ["my_rewards.exact", "my_rewards.first", "math.fsum", "os.path.join"])
def test_a_function_that_can_be_imported_is_accepted_without_importing_it(name):
    assert refused(config(model={"reward_functions": [name]})) == []


def test_a_module_that_only_an_import_hook_finds_is_accepted(tmp_path, monkeypatch):
    class Hook:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return importlib.util.spec_from_file_location(name, tmp_path / "my_rewards.py") if name == "hooked" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])  # as packages installed for development have it
    assert refused(config(model={"reward_functions": ["hooked.exact"]})) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"reward_functions": ["no_such_module.reward"]}}, "`reward_functions`: there is no module `no_such_module`"),
        ({"model": {"reward_functions": ["my_rewards.exakt"]}}, "has no `exakt`. Did you mean `my_rewards.exact`?"),
        ({"model": {"reward_functions": ["my_rewards.WEIGHTS"]}}, "is a value ([1, 2]), not a function"),
        ({"model": {"reward_functions": ["needs_more.reward"]}}, "imports `not_installed_anywhere`, which is not installed"),
        ({"model": {"reward_functions": ["broken.reward"]}}, "broken.py is not Python"),
        ({"model": {"reward_functions": ["exact"]}}, "must be a list of the import path of a function or class but is ['exact']"),
        ({"model": {"environment": "my_rewards.calculator"}}, "`environment`: `my_rewards` has no `calculator`"),
        ({"model": {"advantage": {"class_path": "lightning_rlbatch.functional.GRPOO"}}}, "Did you mean `lightning_rlbatch.functional.GRPO"),
        ({"model": {"policy_loss": "lightning_rlbatch.functional.GSPOO"}}, "Did you mean `lightning_rlbatch.functional.GSPO`?"),
        ({"model": {"policy": "outputs/sft/policy"}}, "`policy`: there is no folder outputs/sft/policy"),
        ({"model": {"policy": "my_models.bild"}}, "Did you mean `my_models.build`"),
        ({"data": {"tokenizer": "my_tokenizers.Letters"}}, "`tokenizer`: there is no module `my_tokenizers`"),
        ({"data": {"train_prompts": "prompts.jsonl"}}, "`train_prompts`: there is no file prompts.jsonl in "),
        ({"data": {"train_prompts": ["a.jsonl", "b.parquet"]}}, "there is no file a.jsonl"),
        ({"data": {"train_prompts": "my_rewards.rows"}}, "`train_prompts`: `my_rewards` has no `rows`"),
        ({"data": {"val_prompts": "data/held_out.jsonl"}}, "`val_prompts`: there is no file data/held_out.jsonl"),
    ],
)
def test_a_file_or_function_that_is_not_there_is_a_sentence_with_the_option_and_the_fix(change, words):
    (text,) = refused(config(**change))
    assert words in text


def test_a_folder_to_replay_that_is_not_there_is_refused():
    content = config()
    options = {"dirpath": "outputs/recorded", "mini_batch_size": 2, "max_tokens_per_rank": 99}
    content["data"] = {"class_path": "lightning_rlbatch.ReplayDataModule", "init_args": options}
    (text,) = refused(content)
    assert "there is no outputs/recorded" in text


def test_fit_refuses_a_missing_file_and_function_before_it_loads_anything(tmp_path, capsys):
    path = write(tmp_path, config(data={"train_prompts": "prompts.jsonl"}, model={"reward_functions": ["my_rewards.exakt"]}))
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", path])
    assert stop.value.code == 1
    error = capsys.readouterr().err
    assert "there is no file prompts.jsonl" in error
    assert "has no `exakt`" in error


TEN = config(
    data={"micro_batch_size": 4, "log_prob_micro_batch_size": 4, "critic_max_tokens_per_rank": 2048, "planner": "best",
          "oversize": "isolate", "mini_batch_size": 17, "equal_size": True, "balance": False},
    model={"rollout_engine": {"max_batch_size": 500}, "kl_kind": "k2", "value_coefficient": 0.1},
    strategy={"sequence_parallel_size": 5},
)  # fmt: skip
WRONG = (
    "micro_batch_size", "log_prob_micro_batch_size", "critic_max_tokens_per_rank", "planner", "oversize", "mini_batch_size", "equal_size",
    "kl_kind", "value_coefficient", "sequence_parallel_size",
)  # fmt: skip


def screen(monkeypatch, capsys, content, folder, *arguments, columns=100):
    monkeypatch.setenv("COLUMNS", str(columns))
    with contextlib.suppress(SystemExit):
        main(["explain", "--config", write(folder, content), *arguments])
    return capsys.readouterr().out


def test_the_first_screen_holds_the_answer_and_each_of_ten_mis_set_options(monkeypatch, capsys, tmp_path):
    sound = screen(monkeypatch, capsys, config(), tmp_path).splitlines()
    assert len(sound) <= 40
    assert "One GPU runs at most 1024 tokens at once: 2 samples of the longest 512 tokens" in " ".join(sound[1:3])
    out = screen(monkeypatch, capsys, TEN, tmp_path)
    assert len(out.splitlines()) <= 40
    mistakes = [" ".join(part.split()) for part in out.split("\n\n")[1].replace("without effect", "refused").split("refused  ")]
    for option in WRONG:
        assert any(option in text for text in mistakes), option


def test_details_hold_every_option_with_its_state_and_the_first_screen_says_how_to_get_them(monkeypatch, capsys, tmp_path):
    assert "--details" in screen(monkeypatch, capsys, config(), tmp_path)
    details = screen(monkeypatch, capsys, config(), tmp_path, "--details")
    assert all(word in details for word in ("workload_coefficient", "24576", "gradient accumulation", "optimizer steps per iteration"))


def test_gpus_that_share_a_rollout_engine_are_in_the_sizes_and_must_divide_the_world():
    sizes = {"train_batch_size": 128, "mini_batch_size": 32, "rollouts_per_prompt": 8}
    content = config(data=sizes, model={"rollout_tensor_parallel_size": 4}, strategy={"sequence_parallel_size": 2})
    content["model"]["class_path"] = "my_engines.Spanning"  # the default engine serves one GPU
    sizes = explain(run_config(content, world_size=16)).sizes
    assert sizes.rank.generated_per_engine == (256, 256)
    assert layers(sizes)["data-parallel rank"]["rollouts of 4 GPUs that share an engine"] == "256"
    content["model"]["init_args"]["rollout_tensor_parallel_size"] = 3
    texts = [finding.text for finding in explain(run_config(content, world_size=16)).findings if finding.level == "refused"]
    assert texts == ["rollout_tensor_parallel_size=3 must divide the number of ranks, 16 (devices x num_nodes)."]


@pytest.mark.parametrize("policy", ["my_models.build", {"class_path": "my_models.build"}])
def test_a_policy_that_is_made_by_a_function_is_counted_when_asked_for(policy, monkeypatch, capsys, tmp_path):
    import helpers

    model = helpers.tiny_llama()
    frozen = model.lm_head.weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert "--build makes it without weights" in " ".join(screen(monkeypatch, capsys, config(model={"policy": policy}), tmp_path).split())
    answer = json.loads(screen(monkeypatch, capsys, config(model={"policy": policy}), tmp_path, "--build", "--json"))
    memory = answer["memory"]
    assert (memory["num_parameters"], memory["counted"]) == (total, "model")
    states = [part["size"] for part in memory["parts"] if (part["role"], part["what"]) == ("policy", "AdamW states")]
    assert states == [8 * -(-(total - frozen) // 4)]
    assert memory["update"] > 0


def test_a_reader_that_goes_away_early_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    code = "from lightning_rlbatch.cli import main; main()"
    command = [sys.executable, "-c", code, "explain", "--json", "--config", write(tmp_path, config())]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("policy_loss", "Gspo", "GSPO"),
        ("advantage", {"class_path": "grpo"}, "GRPO"),
        ("rollout_engine", "vllm", "VLLMEngineConfig"),
        ("advantage", "passatk", "PassAtK or PassAtKTraining"),
    ],
)
def test_a_short_name_that_is_nearly_one_of_ours_is_refused_with_the_right_one(option, value, meant):
    texts = refused(config(model={option: value}))
    assert any(text.startswith(f"`{option}`: there is no class ") and text.endswith(f"Did you mean {meant}?") for text in texts)


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ({"callbacks": ["TrainingDoctr"]}, "`callbacks`: there is no class TrainingDoctr. Did you mean TrainingDoctor?"),
        ({"callbacks": {"class_path": "RichProgresBar"}}, "`callbacks`: there is no class RichProgresBar. Did you mean RichProgressBar?"),
        ({"logger": {"class_path": "CSVLoger"}}, "`logger`: there is no class CSVLoger. Did you mean CSVLogger?"),
        (
            {"logger": [{"class_path": "lightning.pytorch.loggers.WandbLogger"}]},
            "WandbLogger needs no_such_package, which is not",
        ),
        ({"logger": "WandbLogger"}, "WandbLogger needs no_such_package, which is not"),
        ({"callbacks": ["TrainingDoctor", {"class_path": "RichProgressBar"}, "OneOfMine"], "logger": "CSVLogger"}, None),
        ({"callbacks": None, "logger": True}, None),
    ],
)
def test_short_names_of_callbacks_and_loggers_are_looked_up_and_their_packages_too(trainer, text, monkeypatch):
    monkeypatch.setitem(rules_short_names._LOGGERS_NEED, "WandbLogger", ("no_such_package",))
    content = config()
    content["trainer"] |= trainer
    texts = refused(content)
    assert texts == [] if text is None else [found.startswith(text) for found in texts] == [True]


@pytest.mark.parametrize("value", ["my_engines.Spaning", {"class_path": "my_engines.Spaning"}])
def test_an_engine_that_does_not_exist_is_one_finding(value):
    told = [finding.text for finding in explain(run_config(config(model={"rollout_engine": value}))).findings if "Spaning" in finding.text]
    assert told == ["`rollout_engine`: class_path my_engines.Spaning: `my_engines` has no `Spaning`. Did you mean `my_engines.Spanning`?"]


def test_a_folder_with_a_model_and_no_tokenizer_is_refused_as_tokenizer_by_explain_and_by_the_run(project):
    (project / "trained").mkdir()
    for name in ("config.json", "model.safetensors"):
        (project / "trained" / name).write_text("{}")
    told = [text for text in refused(config(data={"tokenizer": "trained"})) if "`tokenizer`" in text]
    advice = "Name the folder or hub name of the model that it was trained from."
    assert told == [f"`tokenizer`: trained holds a model without a tokenizer. {advice}"]
    with pytest.raises(ValueError, match="tokenizer='trained': trained holds a model without a tokenizer"):
        load_tokenizer("trained")


def test_a_short_name_that_is_ours_or_the_users_own_is_not_refused():
    assert refused(config(model={"policy_loss": "GSPO", "advantage": "MyOwnAdvantage"})) == []


@pytest.mark.parametrize(("positions", "level"), [(20, "refused"), (60, "note"), (1000, None)])
def test_samples_longer_than_the_positions_of_the_policy_are_told(positions, level, tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    content = config(model={"policy": "policy"}, data={"max_prompt_length": 40, "max_response_length": 24})
    found = [finding for finding in explain(run_config(content)).findings if "max_position_embeddings" in finding.text]
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all("(max_prompt_length=40 + max_response_length=24)" in finding.text for finding in found)
    assert all(("every prompt would be" if positions == 20 else "more than 36 tokens would be") in finding.text for finding in found)
