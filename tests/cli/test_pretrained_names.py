"""Misspelt folders and hub names of models."""

import pytest
from configs import config, write

from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.pretrained_names import near_names
from lightning_rlbatch.cli.run_config import run_config


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A folder with a model, and a cache of the hub with another."""
    for folder in ("outputs/sft/policy", "my/model"):
        (tmp_path / folder).mkdir(parents=True)
    cached = tmp_path / "cache" / "models--Qwen--Qwen2.5-0.5B" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def findings(policy, *, offline, **data):
    content = config(model={"policy": policy}, data=data)
    return [finding for finding in explain(run_config(content), offline=offline).findings if "policy" in finding.options]


@pytest.mark.parametrize(
    ("policy", "near"),
    [
        ("Qwen/Qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("qwen/Qwen-2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("my/modle", "my/model"),
        ("outputs/sft/polcy", "outputs/sft/policy"),
        ("output/sft/policy", "outputs/sft/policy"),
    ],
)
@pytest.mark.parametrize("offline", [True, False])
def test_a_misspelt_model_is_told_with_the_nearest_one_that_is_here(policy, near, offline):
    (finding,) = findings(policy, offline=offline)
    assert finding.level == ("refused" if offline or policy.count("/") > 1 else "note")
    assert finding.text.endswith(f"Did you mean {near}?")


@pytest.mark.parametrize("policy", ["Qwen/Qwen2.5-0.5B", "my/model"])
def test_a_model_that_is_here_is_no_finding(policy):
    assert findings(policy, offline=True) == []


def test_a_name_like_none_that_is_here_is_refused_offline_and_once_for_all_options_that_hold_it():
    (finding,) = findings("other/thing", offline=True, tokenizer="other/thing")
    assert finding.options == ("policy", "tokenizer")
    assert "`policy`, `tokenizer`: other/thing is neither a folder in " in finding.text
    assert "HF_HUB_OFFLINE is set. Check the spelling, or download it first." in finding.text
    assert near_names("other/thing") == []


def test_fit_refuses_it_offline_before_anything_is_loaded_and_warns_of_it_online(tmp_path, capsys, monkeypatch):
    arguments = ["fit", "--config", write(tmp_path, config(model={"policy": "Qwen/Qwen2.5-0.5"}))]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match="1"):
        main(arguments)
    assert "Did you mean Qwen/Qwen2.5-0.5B?" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lightning_rlbatch.cli.lightning_cli.run", lambda arguments: None)
    with pytest.warns(UserWarning, match=r"asks the hub for it\. Did you mean Qwen/Qwen2.5-0.5B\?"):
        main(arguments)
