import json
import sys

import pytest
from configs import config, write

import lightning_rlbatch.models.scorer as scorer
from lightning_rlbatch.cli import main


@pytest.fixture
def policy_file(tmp_path, monkeypatch):
    """Offer a policy by import path, as a configuration names it."""
    (tmp_path / "toy_policies.py").write_text("import helpers\n\ndef build(seed=0):\n    return helpers.tiny_llama(seed)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "toy_policies.build"
    sys.modules.pop("toy_policies", None)


def run(tmp_path, policy, *arguments, sp=1):
    path = write(tmp_path, config(model={"policy": policy}, strategy={"sequence_parallel_size": sp}))
    try:
        main(["verify", "--config", path, *arguments])
    except SystemExit as stop:
        return stop.code
    return 0


def test_a_sound_policy_passes_in_every_layout_of_the_configuration(tmp_path, policy_file, capsys):
    assert run(tmp_path, policy_file, "--json", sp=2) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["layout"] for row in answer["layouts"]] == ["padded", "packed", "dp=1, sp=2"]
    assert answer["passed"]
    assert max(row["worst"] for row in answer["layouts"]) < 1e-5


def test_a_policy_with_arguments_is_built_from_its_class_path(tmp_path, policy_file, capsys):
    assert run(tmp_path, {"class_path": policy_file, "init_args": {"seed": 3}}, "--lengths", "5,4") == 0
    out = capsys.readouterr().out
    assert "padded" in out
    assert "same" in out


def test_a_difference_beyond_the_tolerance_exits_with_1_and_names_the_layout(tmp_path, policy_file, capsys, monkeypatch):
    original = scorer.packed_model_kwargs

    def positions_run_on(*args, **kwargs):
        found = original(*args, **kwargs)
        found["position_ids"] = found["position_ids"] * 2
        return found

    monkeypatch.setattr(scorer, "packed_model_kwargs", positions_run_on)
    assert run(tmp_path, policy_file, "--json") == 1
    rows = {row["layout"]: row["worst"] for row in json.loads(capsys.readouterr().out)["layouts"]}
    assert rows["padded"] < 1e-5 < rows["packed"]


def test_more_ranks_than_heads_exits_with_1_and_the_models_numbers(tmp_path, policy_file, capsys):
    assert run(tmp_path, policy_file, "--sp", "16") == 1
    assert "at least 16 attention heads but the model has 8" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("arguments", "code"), [(["--lengths", "5,x"], 1), (["--config", "missing.yaml"], 2)])
def test_wrong_arguments_are_named(tmp_path, policy_file, arguments, code, capsys):
    assert run(tmp_path, policy_file, *arguments) == code
    assert capsys.readouterr().err
