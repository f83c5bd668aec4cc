"""Rollout engines chosen and configured from YAML: what is built, what runs, what is refused before a model is loaded."""

import importlib.machinery
import json
import sys
from dataclasses import dataclass

import pytest
import torch
import vllm_stand_in
import yaml
from hand_made import ScriptedEngine, prompts, varied_reward
from helpers import ToyTokenizer, make_trainer
from rollout_toys import mixed_requests, quick_collections, toy_llama

from lightning_rlbatch import PPOModule, RolloutDataModule, rollout
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.data import RecordedRollouts
from lightning_rlbatch.modules.hyperparameters import describe
from lightning_rlbatch.rollout import EngineConfig, EngineContext, SamplingParams, TransformersEngineConfig, VLLMEngineConfig
from lightning_rlbatch.rollout.engine_problems import model_for_vllm
from lightning_rlbatch.testing import run_distributed
from tests.cli.configs import config as large_config
from tests.cli.test_plain_lightning_cli import plain_cli
from tests.e2e.small_run import config


@dataclass(frozen=True)
class OwnEngineConfig(EngineConfig):
    """What users write."""

    length: int = 1

    def build(self, model, context):
        engine = ScriptedEngine()
        engine.told = (self.length, context.longest_sample, type(model).__name__)
        return engine


@pytest.fixture
def stand_in(monkeypatch):
    module = vllm_stand_in.module()
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", module)


def written(folder, name, engine, *, policy=None, trainer=None, **options):
    """Write the configuration of two steps that records its rollouts; return its path."""
    (folder / name).mkdir()
    changes = {"devices": 1, "strategy": "auto", "max_epochs": 1, "callbacks": [], "default_root_dir": str(folder), **(trainer or {})}
    path = config(folder / name, **changes)
    content = yaml.safe_load(path.read_text())
    content["model"]["init_args"].update(options, record_rollouts=str(folder / name / "recorded"))
    if policy is not None:
        content["model"]["init_args"]["policy"] = policy
    if engine is not None:
        content["model"]["init_args"]["rollout_engine"] = engine
    path.write_text(yaml.safe_dump(content))
    return path


def fit(path, *arguments):
    made = plain_cli("fit", "--config", path, *arguments)
    assert made.trainer.global_step == 2
    return made.model


def recorded(folder, name):
    samples = RecordedRollouts(folder / name / "recorded").read(0, 0, 1)
    return dict(zip(samples["sample_id"].tolist(), [ids.tolist() for ids in samples.split_per_sample("input_ids")]))


def named(name, **options):
    return {"class_path": name, "init_args": options}


# -- whole runs -----------------------------------------------------------------------------------------------------------------------


def test_every_method_of_transformers_samples_the_same_completions_from_a_configuration(tmp_path):
    engines = {
        "default": None,
        "two at once": named("TransformersEngineConfig", max_batch_size=2),
        "generate": named("lightning_rlbatch.rollout.TransformersEngineConfig", method="generate"),
        "continuous_batching": named("lightning_rlbatch.rollout.TransformersEngineConfig", method="continuous_batching"),
    }

    paths = {name: written(tmp_path, name, engine) for name, engine in engines.items()}
    paths["command line"] = written(tmp_path, "command line", None)

    def fn(rank, world_size):
        found = {}
        with quick_collections():
            for name, path in paths.items():
                overrides = ["--model.init_args.rollout_engine.method=generate"] if name == "command line" else []
                engine = fit(path, *overrides).rollout_engine
                found[name] = (engine.method, engine.max_batch_size)
        return found

    (found,) = run_distributed(fn, 1, init_process_group=False)
    assert found == {
        "default": ("embedded", None), "two at once": ("embedded", 2), "generate": ("generate", None),
        "continuous_batching": ("continuous_batching", None), "command line": ("generate", None),
    }  # fmt: skip
    expected = recorded(tmp_path, "default")
    assert len(expected) == 8
    for name in found:
        assert recorded(tmp_path, name) == expected, name


@pytest.mark.usefixtures("stand_in")
def test_vllm_from_a_configuration_samples_what_transformers_samples_also_with_two_ranks_to_an_engine(tmp_path):
    """A stand-in for vLLM: each rank's engine gets the weights of the policy that is sharded over both."""
    policy = str(tmp_path / "policy")
    toy_llama(1).save_pretrained(policy)
    sharded = {"trainer": {"devices": 2, "strategy": "rlbatch_fsdp"}, "policy": policy}
    vllm = named("lightning_rlbatch.rollout.VLLMEngineConfig", max_num_seqs=64, gpu_memory_utilization=0.3, sleep_level=1)
    ours = written(tmp_path, "transformers", None, **sharded)
    theirs = written(tmp_path, "vllm", vllm, **sharded, rollout_tensor_parallel_size=2)

    def fn(rank, world_size):
        fit(ours)
        module = fit(theirs)
        return module.rollout_engine.llm.arguments, float(module.trainer.logged_metrics["kl/rollout_mismatch"])

    for arguments, mismatch in run_distributed(fn, 2, init_process_group=False):
        assert (arguments["model"], arguments["tensor_parallel_size"], arguments["max_num_seqs"]) == (policy, 2, 64)
        assert arguments["max_model_len"] == 16  # max_prompt_length + max_response_length
        assert mismatch < 1e-6
    assert recorded(tmp_path, "vllm") == recorded(tmp_path, "transformers")


def test_an_engine_of_ones_own_is_a_class_with_options_and_build(tmp_path):
    path = written(tmp_path, "own", named(f"{__name__}.OwnEngineConfig", length=3))

    def fn(rank, world_size):
        return fit(path).rollout_engine.told

    assert run_distributed(fn, 1, init_process_group=False) == [(3, 16, "LlamaForCausalLM")]


# -- what is built ------------------------------------------------------------------------------------------------------------------------


def test_options_of_the_transformers_engine_arrive():
    model, context = toy_llama(), EngineContext()
    model.set_attn_implementation("eager")
    engine = TransformersEngineConfig(dtype="bfloat16", attn_implementation=None, max_batch_size=3).build(model, context)
    assert (engine.model.dtype, engine.max_batch_size, model.dtype) == (torch.bfloat16, 3, torch.float32)
    assert engine.model.config._attn_implementation == "eager"
    assert TransformersEngineConfig().build(model, context).model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("stand_in")
def test_options_of_vllm_arrive_and_its_log_probs_are_over_the_whole_vocabulary():
    options = {
        "model": "some/other", "dtype": "float32", "gpu_memory_utilization": 0.7, "max_model_len": 99, "max_num_seqs": 7,
        "max_num_batched_tokens": 512, "enforce_eager": True,
    }  # fmt: skip
    context = EngineContext(policy="some/policy", longest_sample=40, top_p=0.9)
    engine = VLLMEngineConfig(**options, sleep_level=0).build(toy_llama(), context)
    assert {name: engine.llm.arguments[name] for name in options} == options
    assert (engine.llm.arguments["enable_sleep_mode"], engine.sleep_level) == (False, 0)
    assert engine.logprobs_mode == "raw_logprobs"
    assert len(engine.generate(mixed_requests(2, 1), SamplingParams(max_new_tokens=3, top_p=0.9))) == 2
    plain = VLLMEngineConfig().build(toy_llama(), EngineContext(policy="some/policy", longest_sample=40))
    assert (plain.logprobs_mode, plain.llm.arguments["max_model_len"], plain.llm.arguments["model"]) == (
        "processed_logprobs", 40, "some/policy",
    )  # fmt: skip


def test_a_folder_of_adapters_gives_vllm_its_base_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    assert model_for_vllm(str(tmp_path), None) == "some/base"
    (tmp_path / "config.json").write_text("{}")  # a whole model with its adapters beside it
    assert model_for_vllm(str(tmp_path), None) == str(tmp_path)
    assert model_for_vllm(str(tmp_path), "other/one") == "other/one"


@pytest.mark.usefixtures("stand_in")
def test_adapters_that_cannot_be_merged_are_refused_before_vllm_starts():
    class Adapted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer, self.active_adapters, self.lora_variant = torch.nn.Linear(2, 2), ["a"], {"a": "DoRA"}

        def get_delta_weight(self, name):
            raise AssertionError("not plain")

    model = torch.nn.ModuleDict({"q_proj": Adapted()})
    with pytest.raises(ValueError, match=r"The adapter of q_proj .* cannot be added to the weight"):
        VLLMEngineConfig().build(model, EngineContext(policy="some/policy"))


def test_a_checkpoint_describes_the_engine_by_plain_values():
    module = PPOModule("some/model", [varied_reward], rollout_engine=TransformersEngineConfig(method="generate"))
    described = module.hparams["rollout_engine"]
    assert described == describe(TransformersEngineConfig(method="generate"))
    assert described["init_args"] == {"method": "generate", "max_batch_size": None, "dtype": None, "attn_implementation": "sdpa"}


# -- what is refused ----------------------------------------------------------------------------------------------------------------------

VLLM = "VLLMEngineConfig"
# Options of the engine, other options of the module, and words of the sentence.
REFUSED = {
    "not installed": (VLLM, {}, {}, r"vLLM is not installed. Install it with: pip install 'lightning-rlbatch\[vllm\]'"),
    "policy": (VLLM, {}, {"policy": "statistics.mean"}, "policy is none: a function makes it"),
    "max_model_len": (VLLM, {"max_model_len": 511}, {}, "max_model_len=511 is less than the 512 tokens"),
    "top_k": (VLLM, {}, {"top_k": 5, "temperature": 0.5}, "top_k=5 .* but the temperature is 0.5"),
    "temperature": (VLLM, {}, {"validation_temperature": 0.001}, "vLLM takes 0.01 .* but the temperature is 0.001"),
    "top_p": (VLLM, {}, {"top_p": 0.5, "validation_temperature": 0.7}, "top_p=0.5 .* but the temperature is 0.7"),
}
OUT_OF_RANGE = {
    "gpu_memory_utilization": (VLLM, {"gpu_memory_utilization": 1.5}, "above 0 and at most 1, but is 1.5"),
    "max_num_seqs": (VLLM, {"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
    "max_num_batched_tokens": (VLLM, {"max_num_batched_tokens": 8, "max_num_seqs": 9}, "is less than max_num_seqs=9"),
    "dtype": (VLLM, {"dtype": "int8"}, "must be one of 'auto'"),
    "sleep_level": (VLLM, {"sleep_level": 3}, "must be one of 0, 1, 2"),
    "method": ("TransformersEngineConfig", {"method": "fast"}, "must be one of 'embedded'"),
    "max_batch_size": ("TransformersEngineConfig", {"max_batch_size": 0}, "must be at least 1"),
    "half": ("TransformersEngineConfig", {"dtype": "half"}, "must be one of 'float32'"),
}


@pytest.fixture
def policy(tmp_path):
    """A folder that names an architecture: explain looks at what a policy's name stands for."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def explained(engine, **options):
    content = large_config(model={"rollout_engine": named(f"lightning_rlbatch.rollout.{engine[0]}", **engine[1]), **options})
    return content, [finding.text for finding in explain(run_config(content)).findings if finding.level == "refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_cannot_do_is_refused_before_a_model_is_loaded_and_by_explain_in_the_same_words(name, policy, request):
    if name != "not installed":
        request.getfixturevalue("stand_in")
    engine, given, options, words = REFUSED[name]
    options = {"policy": policy, **options}
    content, refused = explained((engine, given), **options)
    module = PPOModule(**options, reward_functions=[varied_reward], rollout_engine=getattr(rollout, engine)(**given))
    data = RolloutDataModule(**{**content["data"]["init_args"], "train_prompts": lambda: prompts("abc"), "tokenizer": ToyTokenizer()})
    trainer = make_trainer(1, "auto", max_epochs=1)
    with pytest.raises(ValueError, match=words) as raised:  # the folder has no weights: it does not get that far
        trainer.fit(module, datamodule=data)
    assert refused == [str(raised.value)]


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_when_it_is_given_and_by_explain(name, policy, request):
    request.getfixturevalue("stand_in")
    engine, given, words = OUT_OF_RANGE[name]
    with pytest.raises(ValueError, match=words):
        getattr(rollout, engine)(**given)
    assert [words in text for text in explained((engine, given), policy=policy)[1]] == [True]


def test_an_engine_for_one_rank_is_refused_for_several_in_the_words_of_explain():
    with pytest.raises(ValueError, match="TransformersEngineConfig serves one") as raised:
        TransformersEngineConfig().check(EngineContext(tensor_parallel_size=2))
    assert explained(("TransformersEngineConfig", {}), rollout_tensor_parallel_size=2)[1] == [str(raised.value)]


@pytest.mark.usefixtures("stand_in")
def test_ranks_that_cannot_share_the_attention_heads_are_refused_and_explained(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6}))
    with pytest.raises(ValueError, match="6 heads cannot be split over rollout_tensor_parallel_size=4") as raised:
        VLLMEngineConfig().check(EngineContext(policy=str(tmp_path), tensor_parallel_size=4))
    assert explained((VLLM, {}), policy=str(tmp_path), rollout_tensor_parallel_size=4)[1] == [str(raised.value)]
    VLLMEngineConfig().check(EngineContext(policy=str(tmp_path), tensor_parallel_size=3))


@pytest.mark.parametrize("value", [None, 3])
def test_explain_refuses_what_names_no_class(value):
    findings = explain(run_config(large_config(model={"rollout_engine": value}))).findings
    assert [finding.options for finding in findings if finding.level == "refused"] == [("rollout_engine",)]


def test_something_else_than_a_configuration_is_refused():
    with pytest.raises(TypeError, match="rollout_engine must be an EngineConfig"):
        PPOModule("some/model", [varied_reward], rollout_engine=ScriptedEngine())
