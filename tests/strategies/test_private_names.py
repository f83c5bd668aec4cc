"""Canaries: the private names of Lightning, torch and transformers that we use still exist and still mean what we take them for."""

import ast
import datetime
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from helpers import tiny_llama
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel

import lightning_rlbatch
from lightning_rlbatch.strategies.private_names import PRIVATE_NAMES

HOSTS = ("lightning", "torch", "transformers")


def resolve(path):
    """Return the object at a dotted path; attributes that only instances have are looked up on one."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        for name in parts[split:]:
            if inspect.isclass(found) and not hasattr(found, name):
                found = example(found)
            found = getattr(found, name)
        return found
    raise ImportError(path)


def example(kind):
    if kind is PreTrainedModel:
        return tiny_llama()
    return LlamaConfig() if kind is PretrainedConfig else kind()


@pytest.mark.parametrize("path", PRIVATE_NAMES)
def test_private_name_still_exists(path):
    resolve(path)


def foreign_private_names():
    """Private names in our source that nothing of ours defines, and private imports: what the list has to hold."""
    defined, used = set(), {}
    for file in Path(lightning_rlbatch.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                if isinstance(node.ctx, ast.Store):
                    defined.add(node.attr)
                used.setdefault(node.attr, file.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in HOSTS:
                used |= {alias.name: file.name for alias in node.names if alias.name.startswith("_")}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                defined.add(node.value)  # __slots__, and getattr with a name
    return {name: file for name, file in used.items() if name not in defined and name not in ("_exit", "_asdict")}


def test_every_private_name_in_use_is_on_the_list():
    listed = {path.rsplit(".", 1)[1] for path in PRIVATE_NAMES}
    assert {name: file for name, file in foreign_private_names().items() if name not in listed} == {}


def test_base_strategy_keeps_its_arguments_under_the_names_that_we_read():
    timeout = datetime.timedelta(seconds=7)
    strategy = ModelParallelStrategy(timeout=timeout, save_distributed_checkpoint=False)
    assert strategy._timeout == timeout
    assert strategy._save_distributed_checkpoint is False
    assert strategy._device_mesh is None
    strategy._device_mesh = mesh = object()
    assert strategy.device_mesh is mesh


def test_precision_and_launcher_are_read_from_where_we_put_them():
    strategy = ModelParallelStrategy()
    strategy._precision_plugin = plugin = object()
    strategy._launcher = launcher = object()
    assert strategy.precision_plugin is plugin
    assert strategy.launcher is launcher


def test_base_strategy_chooses_its_launcher_in_the_method_that_we_override():
    strategy = ModelParallelStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.cluster_environment = LightningEnvironment()
    strategy._configure_launcher()
    assert type(strategy.launcher).__name__ == "_SubprocessScriptLauncher"


def test_module_reads_its_mesh_and_its_trainer_from_where_strategies_put_them():
    module = LightningModule()
    assert module._trainer is None
    module._device_mesh = mesh = object()
    assert module.device_mesh is mesh


def test_joining_the_process_group_is_all_that_setup_distributed_does():
    source = inspect.getsource(ModelParallelStrategy._setup_distributed)
    assert "_init_dist_connection" in source
    assert "mesh" not in source


def test_all_dropout_layers_share_the_base_class_that_we_look_for():
    layers = [
        torch.nn.Dropout,
        torch.nn.Dropout1d,
        torch.nn.Dropout2d,
        torch.nn.Dropout3d,
        torch.nn.AlphaDropout,
        torch.nn.FeatureAlphaDropout,
    ]
    assert all(issubclass(layer, torch.nn.modules.dropout._DropoutNd) for layer in layers)


def test_model_names_its_blocks_and_its_attention():
    model = tiny_llama()
    assert "LlamaDecoderLayer" in model._no_split_modules
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
