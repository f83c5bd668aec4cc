"""A model or tokenizer that is not there is told within seconds, by the name of its option."""

import time
import types

import pytest
import torch

from lightning_rlbatch.data.prompt_reading import load_tokenizer
from lightning_rlbatch.models import pretrained
from lightning_rlbatch.models.pretrained import require_pretrained
from lightning_rlbatch.modules.model_sources import load_model
from tests.helpers import make_trainer, tiny_llama
from tests.strategies.runs import ppo, rollouts


@pytest.mark.parametrize("source", ["nodir", "no/such", "./no/such/folder", "/no/such", "no.such.module.build"])
def test_a_model_that_is_nowhere_is_refused_at_once_with_its_option(source):
    start = time.monotonic()
    nowhere = "there is no such folder\\. " if source[0] in "./" else "no such folder here, and .*"  # what is a path cannot be a hub name
    with pytest.raises(ValueError, match=rf"^policy='{source}': {nowhere}Check the spelling"):
        load_model(source)
    with pytest.raises(ValueError, match=rf"^tokenizer='{source}': {nowhere}Check the spelling"):
        load_tokenizer(source)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("option", ["policy", "critic", "reward_model"])
def test_the_run_names_the_option_that_is_wrong(option):
    module = ppo(**{option: "nodir"})
    with pytest.raises(ValueError, match=f"^{option}='nodir': no such folder"):
        make_trainer(1, "auto", max_epochs=1).fit(module, datamodule=rollouts())


def test_a_folder_without_a_model_is_told_from_none(tmp_path):
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        require_pretrained(str(tmp_path), "policy")
    (tmp_path / "config.json").write_text("{}")
    require_pretrained(str(tmp_path), "policy")


def test_what_the_cache_holds_is_not_asked_for_on_the_network(monkeypatch):
    asked = []

    def has_file(source, name, *, local_files_only=False):
        asked.append(local_files_only)
        return name == "config.json"

    monkeypatch.setattr(pretrained, "has_file", has_file)
    require_pretrained("some/model", "policy")
    assert asked == [True]


class Wrapped(torch.nn.Module):
    """What peft's ``get_peft_model`` returns: a module that holds the model, whose layers hold the adapters."""

    def __init__(self, learns_prompts=False):
        super().__init__()
        self.base_model = tiny_llama()
        self.active_peft_config = types.SimpleNamespace(is_prompt_learning=learns_prompts)

    def get_base_model(self):
        return self.base_model


@pytest.mark.parametrize("without_weights", [False, True])
def test_the_model_inside_of_pefts_is_taken(without_weights):
    model = load_model(Wrapped, without_weights=without_weights)
    assert type(model) is type(tiny_llama())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta" if without_weights else "cpu"}


def test_learnt_prompts_are_refused_since_they_would_be_lost():
    with pytest.raises(TypeError, match="Wrapped learns prompts"):
        load_model(lambda: Wrapped(learns_prompts=True))
