"""What a constructor refuses, `explain` refuses too, and says the same: a walk over the signatures."""

import inspect
import math
import types
import typing
from pathlib import Path

import lightning.pytorch as pl
import pytest
from configs import config
from helpers import length_reward

import lightning_rlbatch
from lightning_rlbatch import callbacks, functional, rollout
from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.rules_algorithms import check_algorithms, may_be_refused
from lightning_rlbatch.cli.rules_batching import check_batching
from lightning_rlbatch.cli.rules_names import check_names
from lightning_rlbatch.cli.rules_progress import check_progress
from lightning_rlbatch.cli.rules_ranges import check_ranges
from lightning_rlbatch.cli.rules_trainer import check_trainer
from lightning_rlbatch.cli.rules_training import check_training
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.cli.run_sizes import run_sizes
from lightning_rlbatch.modules.callback_reasons import CALLBACK_REASONS
from lightning_rlbatch.modules.correction import RolloutCorrection

NUMBERS = (-1, 0, 1, 10**12, -0.5, 0.5, 1.5, math.nan, math.inf)
BASES = {functional.PolicyLoss: "policy_loss", functional.AdvantageEstimator: "advantage", functional.KLController: "kl_reward"}
PLACES = "lightning_rlbatch.functional."


def refused(content):
    return [finding.text for finding in explain(run_config(content)).findings if finding.level == "refused"]


def refused_by(content, *rules):
    run = run_config(content)
    return [finding.text for rule in rules for finding in rule(run) if finding.level == "refused"]


def error_of(make, **arguments):
    try:
        make(**arguments)
    except (ValueError, TypeError) as error:
        return str(error)
    return None


def numeric(cls):
    """Yield each option of a class that takes a number, with numbers of its type."""
    hints = typing.get_type_hints(cls.__init__)
    for name in inspect.signature(cls).parameters:
        parts = typing.get_args(hints.get(name)) if typing.get_origin(hints.get(name)) is types.UnionType else (hints.get(name),)
        numbers = {part for part in parts if part in (int, float)}
        if numbers:
            yield from ((name, value) for value in NUMBERS if float in numbers or isinstance(value, int))


def algorithms():
    found = {name: getattr(functional, name) for name in functional.__all__ if name != "FunctionLoss"}
    for name, cls in found.items():
        for base, option in BASES.items():
            if inspect.isclass(cls) and issubclass(cls, base) and not inspect.isabstract(cls):
                yield option, PLACES + name, cls
    yield "rollout_correction", "lightning_rlbatch.modules.correction.RolloutCorrection", RolloutCorrection


def module_with(option, cls, settings, beside):
    return lightning_rlbatch.PPOModule("x", [length_reward], **beside, **{option: cls(**settings)})


def test_settings_of_algorithms_are_refused_in_the_words_of_the_class_that_refuses_them():
    checked = 0
    for option, path, cls in algorithms():
        beside = {"critic": "shared"} if cls is functional.GAE else {}
        for name, value in numeric(cls):
            said = error_of(module_with, option=option, cls=cls, settings={name: value}, beside=beside)
            if said is None:  # small numbers need not be tried at all
                continue
            assert may_be_refused(cls.__name__, {name: value}), f"{cls.__name__}.{name}={value}"
            found = refused_by(config(model={**beside, option: {"class_path": path, "init_args": {name: value}}}), check_algorithms)
            assert said in found, f"{cls.__name__}.{name}={value}: {said!r} not in {found}"
            checked += 1
    assert checked > 100


REQUIRED = {
    "PPOModule": {"policy": "x", "reward_functions": [length_reward]},
    "SFTModule": {"policy": "x"},
    "RolloutDataModule": {**config()["data"]["init_args"]},
    "SFTDataModule": {"train_dataset": "x", "mini_batch_size": 2, "max_tokens_per_rank": 9},
    "ReplayDataModule": {"dirpath": "tests", "mini_batch_size": 2, "max_tokens_per_rank": 9},
    "RLBatchFSDPStrategy": {},
}


def configured(name, changes):
    content = config()
    if name == "RLBatchFSDPStrategy":
        content["trainer"]["strategy"]["init_args"] = changes
    else:
        content["data" if "Data" in name else "model"] = {"class_path": f"lightning_rlbatch.{name}", "init_args": changes}
    return content


@pytest.mark.parametrize("name", REQUIRED)
def test_numbers_that_a_constructor_refuses_are_refused_by_name(name):
    cls = getattr(lightning_rlbatch, name)
    for option, value in numeric(cls):
        said = error_of(cls, **{**REQUIRED[name], option: value})
        if said is not None:
            given = {key: made for key, made in REQUIRED[name].items() if not isinstance(made, list)}
            found = refused_by(configured(name, {**given, option: value}), check_ranges, check_batching, check_training)
            assert any(option in text for text in found), f"{option}={value}: {said}"


def test_callbacks_and_engines_are_walked_too():
    classes = {name: getattr(callbacks, name) for name in callbacks.__all__}
    ours = {name: cls for name, cls in classes.items() if inspect.isclass(cls) and issubclass(cls, pl.Callback)}
    for name, cls in ours.items():
        if name in ("RolloutCallback", "RLBatchModelCheckpoint"):
            continue
        required = {option: "x" for option, found in inspect.signature(cls).parameters.items() if found.default is found.empty}
        for option, value in numeric(cls):
            said = error_of(cls, **{**required, option: value})
            content = config()
            content["trainer"]["callbacks"] = [
                {"class_path": f"lightning_rlbatch.callbacks.{name}", "init_args": {**required, option: value}}
            ]
            assert said is None or any(option in text for text in refused_by(content, check_ranges)), f"{name}.{option}={value}: {said}"
    for option, value in numeric(rollout.TransformersEngineConfig):
        said = error_of(rollout.TransformersEngineConfig, **{option: value})
        assert said is None or refused_by(config(model={"rollout_engine": {option: value}}), check_ranges), said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"mini_batch_size": [1]}}, "`mini_batch_size` must be an integer but is [1]."),
        ({"data": {"train_prompts": 3}}, "`train_prompts` must be text or a list of text or"),
        ({"model": {"policy": 1.5}}, "`policy` must be text or"),
        ({"model": {"remove_padding": {"a": 1}}}, "`remove_padding` must be true or false"),
        ({"model": {"reward_weights": [1, "x"]}}, "`reward_weights` must be a list of number or null"),
        ({"model": {"reward_functions": "my.reward"}}, "`reward_functions` must be a list of"),
        ({"model": {"advantage": 3}}, "`advantage` must be an AdvantageEstimator (its class_path, with init_args) but is 3."),
        ({"model": {"policy_loss": {"class_path": f"{PLACES}PPOClip", "init_args": {"clip_low": "low"}}}},
         "`clip_low` of PPOClip must be a number"),
        ({"model": {"policy_loss": {"class_path": f"{PLACES}DPPO", "init_args": {"divergence": "js"}}}}, "one of 'tv', 'kl'"),
        ({"model": {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lrr": 1}}}},
         "AdamW has no option `lrr`. Did you mean `lr`?"),
        ({"model": {"lr_scheduler": 3}}, "`lr_scheduler` must be the import path of a function or class"),
        ({"strategy": {"timeout": "long"}}, "`timeout` must be a duration such as 0:30:00"),
        ({"strategy": {"wrap_cls": "Block"}}, "`wrap_cls` must be a list of text"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_in_words(change, words):
    texts = refused(config(**change))
    assert any(words in text for text in texts), texts


@pytest.mark.parametrize(
    "value",
    ["rlbatch_fsdp", "ddp", "auto", {"class_path": "lightning.pytorch.strategies.DDPStrategy"}],
    ids=str,
)
def test_values_of_the_trainer_that_lightning_takes_are_taken(value):
    content = config()
    content["trainer"] = {
        "accelerator": "cpu", "devices": 4, "strategy": value, "precision": "bf16-mixed", "max_time": "00:01:00:00", "logger": False,
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.LearningRateMonitor", "init_args": {"logging_interval": "step"}}],
        "profiler": "simple", "deterministic": "warn", "max_epochs": 3, "limit_train_batches": 1.0, "default_root_dir": "out",
    }  # fmt: skip
    content["model"]["init_args"] |= {
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 1.0, "total_steps": 5}},
        "reward_weights": None,
        "critic": "shared",
    }
    assert refused(content) == []


GDPO = {"class_path": f"{PLACES}GDPO"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"advantage": {**GDPO, "init_args": {"weights": [1.0, 2.0]}}}}, "one weight for each of 1 rewards but got"),
        ({"model": {"advantage": {"class_path": "PassAtKTraining"}}, "data": {"rollouts_per_prompt": 4}}, "needs at least 5 rollouts"),
        ({"model": {"overlong_buffer": 500}}, "max_response_length=412"),
        ({"model": {"answer_function": "statistics.no_such"}}, "`answer_function`: "),
        ({"model": {"rollout_engine": {"class_path": "ReplayEngineConfig", "init_args": {"path": "nowhere"}}}},
         "neither a file nor a folder nowhere"),
        ({"model": {"lr_scheduler": {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}}}, "the name of a metric to watch"),
        ({"model": {"reward_functions": ["numpy.mean"]}}, "A reward function is named 'mean', but reward/mean is a metric"),
    ],
)  # fmt: skip
def test_what_the_run_would_refuse_later_is_refused_at_once(change, words):
    texts = refused(config(**change))
    assert any(words in text for text in texts), texts


@pytest.mark.parametrize(
    ("change", "objects"),
    [
        ({"reward_weights": [1.0, 2.0]}, {}),
        ({"reward_functions": []}, {}),
        ({"reward_model": "x", "max_sampling_rounds": 2}, {}),
        ({"reward_model_weight": 2.0}, {}),
        ({"loss_norm_constant": 5.0}, {}),
        ({"kl_reward_kind": "full"}, {}),
        ({"critic_lr": 0.1}, {}),
        ({"value_clip": 0.1}, {}),
        ({"critic": "shared", "critic_lr": 0.1}, {}),
        ({"max_turns": 2}, {}),
        ({"advantage": "GAE"}, {"advantage": functional.GAE()}),
        ({"advantage": GDPO, "overlong_buffer": 5}, {"advantage": functional.GDPO()}),
        ({"advantage": "GDPO", "kl_reward": "FixedKL"}, {"advantage": functional.GDPO(), "kl_reward": functional.FixedKL(0.1)}),
        ({"advantage": GDPO, "reward_weights": [2.0]}, {"advantage": functional.GDPO()}),
    ],
)  # fmt: skip
def test_options_of_the_module_that_contradict_each_other_are_refused_in_its_own_words(change, objects):
    said = error_of(lightning_rlbatch.PPOModule, **{"policy": "x", "reward_functions": [length_reward], **change, **objects})
    assert said in refused_by(config(model=change), check_training)


def test_a_reward_function_named_like_a_metric_is_refused_by_the_module_in_the_same_words():
    def mean(prompts, completions):
        return [0.0] * len(completions)

    said = error_of(lightning_rlbatch.PPOModule, policy="x", reward_functions=[mean])
    assert said in refused(config(model={"reward_functions": ["numpy.mean"]}))


def test_a_module_and_a_data_module_that_do_not_go_together_are_refused():
    content = config()
    content["model"] = {"class_path": "lightning_rlbatch.SFTModule", "init_args": {"policy": "examples.hanoi.model.build_policy"}}
    assert any("needs a module that rolls out" in text for text in refused(content))


# -- the Trainer ---------------------------------------------------------------------------------------------------------------------


def found(trainer, *, data=None):
    content = config(data=data)
    content["trainer"] |= {"max_epochs": 10, "log_every_n_steps": 1, **trainer}
    if isinstance(content["trainer"]["strategy"], str):
        content["trainer"]["strategy"] = {"class_path": content["trainer"]["strategy"], "init_args": {}}
    run = run_config(content)
    rules = (check_names, check_trainer, check_progress, check_training)
    return [(finding.level, finding.options[0], finding.text) for rule in rules for finding in rule(run)]


VALIDATES = {"val_prompts": "tests/data/prompts.jsonl", "val_batch_size": 2}  # two steps


@pytest.mark.parametrize(
    ("trainer", "data", "level", "option", "words"),
    [
        ({"limit_train_batches": 3}, {}, "note", "limit_train_batches", "takes 3 of 4 mini-batches"),
        ({"limit_train_batches": 4}, {}, "without effect", "limit_train_batches", "4 mini-batches in all"),
        ({"limit_train_batches": 0.1}, {}, "refused", "limit_train_batches", "0.25 at least"),
        ({"limit_train_batches": 1.5}, {}, "refused", "limit_train_batches", "share of 0.0 to 1.0"),
        ({"limit_train_batches": 0}, {}, "note", "limit_train_batches", "nothing is trained"),
        ({"overfit_batches": 2, "limit_train_batches": 3}, {}, "without effect", "limit_train_batches", "overfit_batches takes its place"),
        ({"max_steps": 6, "max_epochs": None}, {}, "note", "max_steps", "ends iteration 2 after 2 of its 4 mini-batches"),
        ({"max_steps": 8}, {}, "without effect", "max_epochs", "in iteration 2"),
        ({"max_steps": 100}, {}, "without effect", "max_steps", "are 40 optimizer steps"),
        ({"max_epochs": None}, {}, "note", "max_epochs", "stops after 1000 iterations"),
        ({"max_epochs": -2}, {}, "refused", "max_epochs", "at least -1"),
        ({"fast_dev_run": 2}, {}, "note", "fast_dev_run", "trains on 2 of the 4 mini-batch(es)"),
        ({"fast_dev_run": True}, {}, "without effect", "max_epochs", "fast_dev_run sets it"),
        ({"val_check_interval": 0.5}, {}, "without effect", "val_check_interval", "no val_prompts"),
        ({"num_sanity_val_steps": 3}, {}, "without effect", "num_sanity_val_steps", "no val_prompts"),
        ({"val_check_interval": 5}, VALIDATES, "refused", "val_check_interval", "more than an iteration has, 4"),
        ({"val_check_interval": 0.5}, VALIDATES, "note", "val_check_interval", "after every 2 of their 4"),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, VALIDATES, "note", "val_check_interval", "every 3 mini-batches"),
        ({"check_val_every_n_epoch": 20}, VALIDATES, "without effect", "check_val_every_n_epoch", "would come after 20"),
        ({"limit_val_batches": 0.3}, VALIDATES, "refused", "limit_val_batches", "2 validation step(s) is less than one"),
        ({"limit_val_batches": 2}, VALIDATES, "without effect", "limit_val_batches", "2 step(s) in all"),
        ({"limit_val_batches": 0}, VALIDATES, "without effect", "val_prompts", "switches validation off"),
        ({"log_every_n_steps": 50}, {}, "note", "log_every_n_steps", "never reach the logger"),
        ({"log_every_n_steps": 5}, {}, "note", "log_every_n_steps", "in one of 5 iterations"),
        ({"precision": "16-mixed", "strategy": "rlbatch_fsdp"}, {}, "note", "precision", "is bf16-mixed on the CPU"),
        ({"precision": 16}, {}, "refused", "precision", "pass the plugin lightning_rlbatch.strategies.FSDPMixedPrecision"),
        ({"precision": "64-true"}, {}, "refused", "precision", "pass the plugin lightning.pytorch.plugins.DoublePrecision"),
        ({"precision": "fp8"}, {}, "refused", "precision", "one of"),
        ({"strategy": "fdsp"}, {}, "refused", "strategy", "There is no strategy 'fdsp'"),
        ({"strategy": "deepspeed_stage_2"}, {}, "refused", "strategy", "does not run these modules"),
        ({"strategy": {"class_path": "lightning.pytorch.strategies.FSDPStrategy"}}, {}, "refused", "strategy", "does not run these"),
        ({"limit_test_batches": 3}, {}, "without effect", "limit_test_batches", "neither tests nor predicts"),
        ({"use_distributed_sampler": False}, {}, "without effect", "use_distributed_sampler", "shares samples out itself"),
        ({"devices": 0}, {}, "refused", "devices", "no number of devices"),
    ],
)  # fmt: skip
def test_options_of_the_trainer_are_told_in_mini_batches_and_iterations(trainer, data, level, option, words):
    texts = found(trainer, data=data)
    assert any((level, option) == text[:2] and words in text[2] for text in texts), texts


def test_a_quiet_trainer_is_told_nothing():
    assert found({}) == []


def test_callbacks_that_fit_refuses_are_refused():
    for name in (*CALLBACK_REASONS, "BackboneFinetuning"):
        assert issubclass(getattr(pl.callbacks, name), pl.Callback)
        callback = {"class_path": f"lightning.pytorch.callbacks.{name}"}
        assert any(option == "callbacks" for _, option, _ in found({"callbacks": [callback]})), name
    doctor = {"class_path": "lightning_rlbatch.callbacks.TrainingDoctor", "init_args": {"ignore": ["entropy"]}}
    assert any("there is no rule 'entropy'. Rules: first_ratio, " in text for _, _, text in found({"callbacks": [doctor]}))
    timed = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"train_time_interval": "0:30:00"}}
    assert any("never saves by time" in text for _, _, text in found({"callbacks": [timed]}))


# -- prompts -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "more_rewards.py").write_text("def exact(prompts, completions, answer, *, scale):\n    return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(lightning_rlbatch.__path__[0]) + "/..")
    return tmp_path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n{"question": "b"}\n', "Line 2 of prompts.jsonl has no column 'prompt'; it has 'question'"),
        ("", "prompts.jsonl has no rows: it is empty."),
        ('{"prompt": "a"}\n\n{"prompt": \n', "Line 3 of prompts.jsonl is not JSON"),
        ('{"prompt": "a"}\n[1]\n', "Line 2 of prompts.jsonl must be a JSON object"),
        ('{"prompt": 3}\n', "Line 1 of prompts.jsonl: column 'prompt' must be text, or a list of messages, but is 3."),
        ('{"prompt": "a", "completions": "b"}\n', "a column 'completions', which would hide"),
    ],
)
@pytest.mark.parametrize("option", ["train_prompts", "val_prompts"])
def test_a_file_of_prompts_that_cannot_be_read_is_refused_with_line_and_column(option, content, words, folder):
    (folder / "prompts.jsonl").write_text(content)
    (text,) = refused(config(data={option: "prompts.jsonl"}))
    assert text.startswith(f"`{option}`: ")
    assert words in text


def test_a_parquet_file_is_judged_by_its_columns_and_a_missing_file_by_its_name(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for columns, words in (
        ({"question": ["a"]}, "no column 'prompt'; it has 'question'"),
        ({"prompt": [1]}, "but holds int64"),
        ({"prompt": pyarrow.array([], "string")}, "it is empty"),
    ):
        parquet.write_table(pyarrow.table(columns), folder / f"{len(words)}.parquet")
        (text,) = refused(config(data={"train_prompts": f"{len(words)}.parquet"}))
        assert words in text
    (folder / "broken.parquet").write_bytes(b"PAR1 no more")
    (text,) = refused(config(data={"train_prompts": "broken.parquet"}))
    assert "no whole Parquet file" in text
    parquet.write_table(pyarrow.table({"prompt": ["a"], "answer": ["b"]}), folder / "good.parquet")
    assert refused(config(data={"train_prompts": "good.parquet"})) == []


def test_what_a_reward_function_takes_must_be_a_column(folder):
    (folder / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    options = {"data": {"train_prompts": "prompts.jsonl"}, "model": {"reward_functions": ["more_rewards.exact"]}}
    (text,) = refused(config(**options))
    assert "Reward function 'exact' takes scale, but the rows of `train_prompts` have no such column. It may take: answer, " in text


def test_of_a_large_file_a_part_is_read_and_that_is_said(folder, monkeypatch):
    monkeypatch.setattr("lightning_rlbatch.cli.prompt_files.MOST_BYTES", 2000)
    (folder / "large.jsonl").write_text('{"prompt": "some words"}\n' * 1000 + "no JSON\n")
    findings = explain(run_config(config(data={"train_prompts": "large.jsonl"}))).findings
    assert any("rows of large.jsonl were looked at" in finding.text for finding in findings)
    assert not any(finding.level == "refused" for finding in findings)


def test_nothing_that_stands_in_a_configuration_makes_explain_fail():
    for option in ("train_batch_size", "mini_batch_size", "rollouts_per_prompt", "ppo_epochs", "max_tokens_per_rank", "max_prompt_length"):
        for value in ("word", True, [1], None, -1):
            run = run_config(config(data={option: value}))
            assert run_sizes(run) is None or option.startswith("max")
            assert refused_by(config(data={option: value}), check_names, check_ranges, check_batching)


def test_types_of_a_users_own_are_his_own_business(folder):
    (folder / "own_types.py").write_text(
        "import enum\nfrom pathlib import Path\nfrom typing import NamedTuple, TypedDict\nfrom lightning_rlbatch import RolloutDataModule\n"
        "class Colour(enum.Enum):\n    RED = 1\nclass Pair(NamedTuple):\n    a: int\n    b: int\nclass Named(TypedDict):\n    a: int\n"
        "class Data(RolloutDataModule):\n"
        "    def __init__(self, file: Path, colour: Colour, pair: Pair, named: Named, number: int = 3, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
    )
    content = config(
        data={"file": "a/b.txt", "colour": "RED", "pair": [1, 2], "named": {"a": 1, "z": 2}, "train_prompts": "own_types.rows"}
    )
    content["data"]["class_path"] = "own_types.Data"
    texts = refused(content)
    assert [text for text in texts if "own_types` has no `rows`" not in text] == []
    content["data"]["init_args"]["number"] = "many"
    assert "`number` must be an integer but is 'many'." in refused(content)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"advantage": "GRPOO"}}, "there is no class GRPOO. Did you mean GRPO?"),
        ({"model": {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": "fast"}}}}, "`lr` of AdamW must be a number"),
        ({"model": {"optimizer": "torch.optim.Adamm"}}, "Did you mean `torch.optim.Adam`?"),
    ],
)
def test_names_that_lead_nowhere_are_refused_wherever_they_stand(change, words):
    texts = refused(config(**change))
    assert any(words in text for text in texts), texts


def test_names_of_classes_callbacks_and_checkpoints_lead_somewhere():
    content = config() | {"ckpt_path": "nowhere.ckpt", "seed_everything": "many"}
    content["data"]["class_path"] = "lightning_rlbatch.RolloutDataModul"
    content["trainer"]["callbacks"] = ["lightning_rlbatch.callbacks.TrainingDocto"]
    words = (
        "`ckpt_path`: there is no checkpoint nowhere.ckpt",
        "`seed_everything` must be an integer",
        "Did you mean `lightning_rlbatch.RolloutDataModule`?",
        "Did you mean `lightning_rlbatch.callbacks.TrainingDoctor`?",
    )
    texts = refused(content)
    assert all(any(word in text for text in texts) for word in words), texts
    assert not any("ckpt_path" in text for text in refused(config() | {"ckpt_path": "last", "seed_everything": True}))


def test_the_commands_of_the_documentation_that_explain_an_example_are_answered(monkeypatch, capsys):
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    lines = [line for page in (root / "docs").glob("*.md") for line in page.read_text(encoding="utf-8").splitlines()]
    commands = {line.partition("#")[0].strip() for line in lines if line.startswith("rlbatch explain --config examples/")}
    assert len(commands) >= 4
    for command in commands:
        main(command.split()[1:])  # exits with 1 if the configuration is refused
        assert "One GPU runs" in capsys.readouterr().out
