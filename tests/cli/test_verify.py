import json
import sys

import pytest
from configs import config, write

import lightning_rlbatch.models.scorer as scorer
from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.cli.verify import layout_of


@pytest.fixture
def policy_file(tmp_path, monkeypatch):
    """Offer a policy by import path, as a configuration names it."""
    (tmp_path / "toy_policies.py").write_text(
        "import helpers\nfrom transformers import LlamaForCausalLM\n\ndef build(seed=0):\n    return helpers.tiny_llama(seed)\n\n"
        "def deep():\n    config = helpers.tiny_llama().config\n    config.num_hidden_layers = 24\n    return LlamaForCausalLM(config)\n"
    )
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
    assert [row["layout"] for row in answer["layouts"]] == ["padded", "packed", "dp=2, sp=2"]  # all of the 4 ranks
    assert answer["tested"] == "padded, packed and on 4 CPU ranks (dp=2, sp=2)"
    assert answer["not_tested"] == ["the gathering of parameters by FSDP, which changes no number"]
    assert answer["passed"]
    assert max(row["worst"] for row in answer["layouts"]) < 1e-10  # in float64 nothing but the last digits differs


def test_a_deep_model_passes_in_float32_by_default_and_its_faults_do_not(tmp_path, policy_file, capsys, monkeypatch):
    policy = {"class_path": "toy_policies.deep"}
    assert run(tmp_path, policy, "--json", "--dtype", "float32", "--dp", "1") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tolerance"]["gradients"] == pytest.approx(max(1e-5, 5 * answer["rounding"]["gradient"]))
    plant_a_fault(monkeypatch)
    assert run(tmp_path, policy, "--json", "--dtype", "float32", "--dp", "1") == 1


def test_padding_alone_is_compared_where_the_configuration_pads(tmp_path, policy_file, capsys):
    assert run(tmp_path, policy_file, "--json", "--model.remove_padding=false") == 0
    assert [row["layout"] for row in json.loads(capsys.readouterr().out)["layouts"]] == ["padded"]


@pytest.mark.parametrize(
    ("change", "world", "layout", "words"),
    [
        ({}, 1, (1, 1), "Tested: padded, packed. Not tested: nothing of this configuration."),
        ({}, 64, (8, 1), "more than 8 of the run's 64 data-parallel ranks"),
        ({"strategy": {"sequence_parallel_size": 4}}, 16, (2, 4), "more than 2 of the run's 4 data-parallel ranks"),
        ({"strategy": {"sequence_parallel_size": 16}}, 16, (1, 1), "sequence_parallel_size=16 (this machine can fork 8 ranks"),
        ({"model": {"remove_padding": False}}, 4, (1, 1), "ranks, since remove_padding is false"),
    ],
)
def test_the_layout_of_the_run_is_tested_as_far_as_the_machine_goes_and_the_rest_is_named(change, world, layout, words, monkeypatch):
    monkeypatch.setattr("lightning_rlbatch.cli.verify._free_memory", lambda: 2**40)
    found = layout_of(run_config(config(**change), world), dp=None, sp=None, size=2**20)
    assert (found.dp, found.sp) == layout
    assert words in found.sentence
    monkeypatch.setattr("lightning_rlbatch.cli.verify._free_memory", lambda: 2**20)
    assert layout_of(run_config(config(**change), world), dp=None, sp=None, size=2**20).dp <= 2


@pytest.mark.parametrize("option", ["--sp", "--dp"])
def test_no_ranks_at_all_are_refused(tmp_path, policy_file, option, capsys):
    assert run(tmp_path, policy_file, option, "0") == 2
    assert "at least 1, not 0" in capsys.readouterr().err


def test_a_policy_with_arguments_is_built_from_its_class_path_and_the_table_fits_eighty_columns(tmp_path, policy_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run(tmp_path, {"class_path": policy_file, "init_args": {"seed": 3}}, "--lengths", "5,4") == 0
    out = capsys.readouterr().out
    assert "padded" in out
    assert "may be trained in any of these layouts" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def plant_a_fault(monkeypatch):
    original = scorer.packed_model_kwargs

    def positions_run_on(*args, **kwargs):
        found = original(*args, **kwargs)
        found["position_ids"] = found["position_ids"] * 2
        return found

    monkeypatch.setattr(scorer, "packed_model_kwargs", positions_run_on)


def test_a_difference_beyond_the_tolerance_exits_with_1_and_names_layout_parameter_and_way_out(tmp_path, policy_file, capsys, monkeypatch):
    plant_a_fault(monkeypatch)
    assert run(tmp_path, policy_file) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "packed: differs by up to" in out
    assert "in the gradient of model." in out
    assert "Set remove_padding: false" in out
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
