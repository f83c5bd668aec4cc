import shlex
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import jsonargparse
import pytest
import yaml
from configs import config, write
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import lightning_rlbatch
from lightning_rlbatch.callbacks import PretrainedExport, RolloutLogger, RolloutRecorder
from lightning_rlbatch.cli import RLBatchCLI, main
from lightning_rlbatch.cli.config_file import read_config
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.imports import import_problem
from lightning_rlbatch.cli.lightning_cli import classes_first, strategy_as_class
from lightning_rlbatch.cli.outputs import print_outputs
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.cli.saved_config import SaveRunConfig
from lightning_rlbatch.cli.signatures import class_source
from lightning_rlbatch.data.prompt_reading import load_tokenizer

SOUND = config(model={"reward_functions": ["math.fsum"]})
OWN_TOKENIZER = config(model={"reward_functions": ["math.fsum"]}, data={"tokenizer": "argparse.ArgumentParser"})


@pytest.mark.parametrize("content", [SOUND, OWN_TOKENIZER], ids=["folder", "import path"])
def test_the_whole_configuration_that_is_printed_or_saved_can_be_run_again(content, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["rlbatch", "fit", "--config", write(tmp_path, content), "--print_config"])
    with pytest.raises(SystemExit) as stop:
        main()
    printed = yaml.safe_load(capsys.readouterr().out)
    assert stop.value.code == 0
    given = content["data"]["init_args"]
    assert {name: printed["data"]["init_args"][name] for name in given} == given
    assert not explain(run_config(printed)).refused


def test_a_tokenizer_may_be_named_by_its_import_path():
    assert load_tokenizer("collections.OrderedDict") == {}


def test_help_names_every_command(capsys):
    main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {command} " in printed for command in ("fit", "validate", "explain", "verify", "plan", "report", "export", "predict"))


def test_an_unknown_command_is_told_with_those_that_exist(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", "run.yaml"])
    assert "There is no command 'train'" in capsys.readouterr().err


# -- our reader of configurations beside LightningCLI's ------------------------------------------------------------------------------


class Parsing(RLBatchCLI):
    """Reads command lines; makes and runs nothing."""

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass

    def read(self, arguments):
        """Return the options of another command line, with those that it leaves out."""
        self.parse_arguments(self.parser, ["fit", *arguments])
        return plain(self.config.fit.as_dict())


def plain(value):
    """Return an option without what tells where it was read."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if key not in ("__path__", "config")}
    return [plain(item) for item in value] if isinstance(value, list) else getattr(value, "__qualname__", None) or value


@pytest.fixture(scope="module")
def cli(tmp_path_factory):
    lightning_rlbatch.register()
    path = write(tmp_path_factory.mktemp("cli"), SOUND)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", DeprecationWarning)  # Lightning's calls of jsonargparse
        patch.setattr(sys, "argv", ["rlbatch"])
        yield Parsing(args=["fit", "--config", path])


OWN = "tests.cli.own_parts"
FULL = config(
    model={
        "policy": "examples.hanoi.model.build_policy",
        "reward_functions": [f"{OWN}.reward"],
        "temperature": 0.7,
        "policy_loss": {"class_path": "lightning_rlbatch.functional.PPOClip", "init_args": {"clip_low": 0.1, "dual_clip": 3.0}},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01, "amsgrad": True}},
        "rollout_engine": {"class_path": "lightning_rlbatch.rollout.TransformersEngineConfig", "init_args": {"max_batch_size": 3}},
    },
    strategy={"grad_sync": "every"},
)
FULL["trainer"] |= {
    "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "out", "name": "run"}},
    "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "ck", "save_last": True}}],
}
FILES = {
    "full.yaml": FULL,
    "no_class.yaml": {"model": {"init_args": FULL["model"]["init_args"]}, "data": {"init_args": FULL["data"]["init_args"]}},
    "more.yaml": {"model": {"class_path": f"{OWN}.OwnPPO", "init_args": {"own": 5}}, "data": {"init_args": {"seed": 3}}},
    "strategy.yaml": {"class_path": f"{OWN}.OwnStrategy", "init_args": {"knob": 2}},
    "loss.yaml": {"class_path": "lightning_rlbatch.functional.GSPO"},
    "callbacks.yaml": [{"class_path": f"{OWN}.OwnCallback", "init_args": {"x": 2}}],
    "parts.yaml": {
        **FULL,
        "trainer": {"strategy": "strategy.yaml", "callbacks": "callbacks.yaml"},
        "model": {**FULL["model"], "init_args": {**FULL["model"]["init_args"], "policy_loss": "loss.yaml"}},
    },
}
COMMAND_LINES = [
    f"-c full.yaml --model {OWN}.OwnPPO --model.own=5 --data {OWN}.OwnData",
    f"-c full.yaml --model={OWN}.NarrowPPO",
    f"-c full.yaml --model.class_path {OWN}.NarrowPPO --data.class_path={OWN}.OwnData --data.more 3",
    f"-c no_class.yaml --model {OWN}.OwnPPO --data {OWN}.OwnData",
    f"-c full.yaml --config more.yaml --trainer.strategy={OWN}.OwnStrategy --trainer.strategy.knob=4",
    f"-c full.yaml --trainer.strategy {OWN}.OwnStrategy",
    "-c full.yaml --trainer.strategy strategy.yaml --trainer.logger lightning.pytorch.loggers.TensorBoardLogger",
    "-c full.yaml --trainer.logger=false --trainer.callbacks.save_last=false",
    f"-c full.yaml --trainer.callbacks+={OWN}.OwnCallback --trainer.callbacks.x=4 --trainer.logger.name=other",
    "-c parts.yaml --trainer.callbacks+=callbacks.yaml",
    f"-c full.yaml --trainer.callbacks={OWN}.OwnCallback --model.optimizer=torch.optim.SGD --model.optimizer.momentum=0.5",
    "-c full.yaml --model.policy_loss=GSPO --model.rollout_engine=VLLMEngineConfig --model.reward_functions+=math.fsum",
    "-c full.yaml --model.policy_loss.clip_high=0.4 --data.train_prompts+=more.jsonl --model.policy=my/folder",
    '-c full.yaml --config \'{"trainer": {"max_epochs": 3}}\' --trainer \'{"max_steps": 4}\' --model \'{"init_args": {"top_k": 3}}\'',
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("configurations")
    for name, content in FILES.items():
        (path / name).write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_what_is_checked_before_a_run_is_what_lightningcli_reads(line, cli, folder, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = shlex.split(line)
    ours = read_config(arguments)
    (folder / "ours.yaml").write_text(yaml.safe_dump(ours))
    assert cli.read(["--config", "ours.yaml"]) == cli.read(arguments)


def test_a_part_in_a_file_of_its_own_is_looked_for_beside_the_file_that_names_it(folder):
    read = read_config(["--config", str(folder / "parts.yaml")])
    assert read["trainer"] == {"strategy": FILES["strategy.yaml"], "callbacks": FILES["callbacks.yaml"]}
    assert read["model"]["init_args"]["policy_loss"] == FILES["loss.yaml"]


def test_classes_come_before_the_files_that_may_leave_them_out():
    given = ["fit", "--config=a.yaml", "--model", "mine.PPO", "--data.class_path=mine.Data", "--trainer.strategy", "mine.S", "--model.x=a"]
    assert classes_first(given) == [
        "fit", "--model=mine.PPO", "--data=mine.Data", "--config=a.yaml", "--model", "mine.PPO", "--data.class_path=mine.Data",
        "--trainer.strategy.class_path", "mine.S", "--model.x=a",
    ]  # fmt: skip
    for untouched in (["fit", "--model", "model.yaml"], ["fit", "--trainer.strategy=ddp"], ["--config", "all.yaml", "fit"], []):
        assert classes_first(untouched) == untouched


@pytest.mark.parametrize("start", ["--config alias.yaml", "--config full.yaml --trainer.strategy=rlbatch_fsdp", "--config full.yaml"])
def test_options_of_our_strategy_go_with_its_registered_name_too(start, cli, folder, monkeypatch):
    monkeypatch.chdir(folder)
    Path("alias.yaml").write_text(yaml.safe_dump({**FULL, "trainer": {"strategy": "rlbatch_fsdp"}}))
    read = cli.read([*start.split(), "--trainer.strategy.sequence_parallel_size", "4", "--trainer.strategy.async_save=true"])
    strategy = read["trainer"]["strategy"]
    assert strategy["class_path"].endswith("RLBatchFSDPStrategy")
    assert (strategy["init_args"]["sequence_parallel_size"], strategy["init_args"]["async_save"]) == (4, True)
    for untouched in (
        ["fit", "--trainer.strategy.help"],
        ["fit", "--trainer.strategy.x=1"],
        ["fit", "--config=no", "--trainer.strategy.x=1"],
    ):
        assert strategy_as_class(untouched) == untouched


def test_further_arguments_of_a_class_are_those_of_its_base_only_if_they_go_there():
    own = class_source(f"{OWN}.OwnPPO")
    assert {"own", "policy"} <= own.options.keys()
    assert class_source("lightning.pytorch.strategies.DDPStrategy").options is None  # they go to DistributedDataParallel


# -- what is refused, in one line ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "--config", "missing.yaml"], "There is no configuration file missing.yaml in"),
        (["validate", "-c=missing.yaml", "--print_config"], "There is no configuration file missing.yaml in"),
        (["--config", "missing.yaml", "fit"], "There is no configuration file missing.yaml in"),
        (["fit", "--config", "."], "is a folder"),
        (["fit"], "No configuration given. Pass --config run.yaml."),
        (["fit", "--config", "broken.yaml"], "broken.yaml is not valid YAML"),
        (["fit", "--config", "below.yaml"], "below.yaml has its sections under `fit:`. Write rlbatch --config below.yaml fit"),
        (["fit", "--config", "full.yaml", "--trainer.fast_dev_run"], "--trainer.fast_dev_run needs a value"),
    ],
)
def test_a_command_line_that_cannot_be_read_gets_one_answer_before_anything_is_loaded(arguments, words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "lightning_rlbatch.cli.lightning_cli", None)  # to import it would fail
    Path("broken.yaml").write_text("model: [")
    Path("below.yaml").write_text(yaml.safe_dump({"fit": FULL}))
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    error = capsys.readouterr().err
    assert words in error
    assert "usage:" not in error


def test_an_error_of_lightningcli_stands_without_the_list_of_all_options(cli, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match="2"):
        cli.read(["--config", "full.yaml", "--trainer.callbacks+=NoSuchCallback"])
    error = capsys.readouterr().err
    assert "NoSuchCallback" in error
    assert "[--trainer." not in error


def test_export_says_what_it_needs_where_it_is_given_something_else(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(folder)
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / "last.ckpt").write_text("not looked at")
    Path("named.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [{"init_args": {"dirpath": str(tmp_path / "ck")}}]}}))
    for given, words in (
        ("full.yaml", "full.yaml is a configuration. The command needs the checkpoint of a run: a .ckpt file"),
        ("named.yaml", f"Here: rlbatch export {tmp_path / 'ck' / 'last.ckpt'} FOLDER"),
        (str(tmp_path / "ck"), f"is no checkpoint. .*Here: rlbatch export {tmp_path / 'ck' / 'last.ckpt'} FOLDER"),
        ("missing.ckpt", "no checkpoint at missing.ckpt"),
    ):
        with pytest.raises(SystemExit, match="1"):
            main(["export", given])
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert all(part in error for part in words.split(".*"))


# -- what is said at the end ---------------------------------------------------------------------------------------------------------


def test_outputs_are_named_if_they_are_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    callbacks = [
        ModelCheckpoint("checkpoints"),
        RolloutRecorder("recorded"),
        RolloutLogger("texts"),
        RolloutLogger(),
        PretrainedExport("out"),
    ]
    trainer = SimpleNamespace(callbacks=callbacks, loggers=[CSVLogger("logs", name="run", version=0)])
    print_outputs(trainer)
    assert capsys.readouterr().out == ""
    for name in ("checkpoints/last.ckpt", "recorded/iteration_000000", "logs/run/version_0/metrics.csv", "out/config.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    (tmp_path / "texts").mkdir()
    print_outputs(trainer)
    assert capsys.readouterr().out == (
        "Written: checkpoints in checkpoints; recorded rollouts in recorded; transformers folder out;"
        " plots: rlbatch report logs/run/version_0\n"
    )


class Saves:
    """In the place of a parser: keeps the name of what is saved."""

    def save(self, config, path, **options):
        self.path = path


def test_a_saved_configuration_is_never_written_over_the_one_that_was_given(tmp_path):
    given = jsonargparse.Namespace(config=[None])  # where `--config` is kept
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(log_dir=str(tmp_path), is_global_zero=True, strategy=strategy)
    for stage, name in (("fit", "config.yaml"), ("validate", "config_validate.yaml")):
        callback = SaveRunConfig(saves := Saves(), given, overwrite=True)
        callback.setup(trainer, None, stage)
        assert saves.path == str(tmp_path / name)
    (tmp_path / "config.yaml").write_text("my own")
    given.config.append(jsonargparse.Path(str(tmp_path / "config.yaml"), "fr"))
    with pytest.warns(UserWarning, match="config.yaml is the file that this run was started with"):
        SaveRunConfig(None, given, overwrite=True).setup(trainer, None, "fit")


# -- modules whose text does not show what they find ---------------------------------------------------------------------------------

MODULES = {
    "hidden/deep.py": "def score(completions): return completions\n",
    "changes_path.py": "import sys\nsys.path.insert(0, 'hidden')\nimport deep\nfrom deep import score\ndef reward(completions): ...\n",
    "by_another.py": "import only_path\nimport deep\ndef reward(completions): ...\n",
    "only_path.py": "import sys\nsys.path.append('hidden')\n",
    "around/__init__.py": "import site\nsite.addsitedir('hidden')\n",
    "around/inner.py": "import deep\ndef reward(completions): ...\n",
    "within/__init__.py": "from .paths import *\nfrom . import deeper\n",
    "within/paths.py": "",
    "within/deeper.py": "import sys\nsys.path.append('hidden')\n",
    "within/inner.py": "import deep\ndef reward(completions): ...\n",
    "made_names.py": "first, second = [len, len]\nfor last in (): pass\nglobals().update(made=len)\n",
    "some_names.py": "first, second = [len, len]\nfor last in (): pass\n",
    "plainly_wrong.py": "import deep\ndef reward(completions): ...\n",
}


def test_a_module_that_changes_the_path_or_makes_its_names_is_not_refused_for_what_it_does_not_show(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    fine = ("changes_path.reward", "changes_path.score", "by_another.reward", "around.inner.reward", "within.inner.reward")
    fine = (*fine, "made_names.made", "some_names.second")
    assert {path: import_problem(path) for path in (*fine, "some_names.last")} == dict.fromkeys((*fine, "some_names.last"))
    assert "imports `deep`, which is not installed" in str(import_problem("plainly_wrong.reward"))
    assert "has no `third`" in str(import_problem("some_names.third"))
    (tmp_path / "some_names.py").write_text("third = len\n")  # read again in the state that it is in
    assert import_problem("some_names.third") is None
    (tmp_path / "own_class.py").write_text("import only_path\nfrom lightning_rlbatch import PPOModule\nclass Own(PPOModule): ...\n")
    for path, refusals in (("own_class.Own", 0), ("lightning_rlbatch.PPOModule", 1)):  # the class is imported before the function
        content = config(model={"reward_functions": ["deep.score"]})
        content["model"]["class_path"] = path
        texts = [finding.text for finding in explain(run_config(content)).findings if finding.level == "refused"]
        assert len(texts) == refusals
    Path("rewards.jsonl").write_text("")
    assert "is a file" in str(import_problem("rewards.jsonl"))
