import pytest
import yaml
from configs import config, write

from lightning_rlbatch.cli import main
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.run_config import run_config
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
    assert all(f"\n  {command} " in printed for command in ("fit", "validate", "explain", "verify", "plan", "report", "export"))


def test_an_unknown_command_is_told_with_those_that_exist(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--config", "run.yaml"])
    assert "There is no command 'train'" in capsys.readouterr().err
