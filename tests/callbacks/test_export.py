"""A trained policy leaves as a plain transformers folder, by callback or by command."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from lightning_rlbatch.callbacks import PretrainedExport
from lightning_rlbatch.cli import export
from lightning_rlbatch.cli import main as rlbatch
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed
from tests.helpers import tiny_llama
from tests.rollout.low_rank import adapted
from tests.strategies.runs import run, sft, sft_data


def tokenizer():
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 3, "<eos>": 2}, unk_token="a")), eos_token="<eos>")


@pytest.mark.parametrize("tied", [False, True])
def test_callback_writes_model_tokenizer_and_generation_config(tied, tmp_path):
    def main(rank, size):
        module, data = sft(policy=lambda: tiny_llama(tied=tied)), sft_data()
        build = module.build_models

        def with_generation_config():
            build()
            module.policy.model.generation_config = GenerationConfig(temperature=0.7, do_sample=True, eos_token_id=2)

        module.build_models, data.tokenizer = with_generation_config, tokenizer()
        return run(module, data, size, max_epochs=1, callbacks=(PretrainedExport(str(tmp_path / "policy")),))["parameters"]

    expected = run_distributed(main, 2, init_process_group=False)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    for name, value in model.named_parameters():
        assert torch.equal(value, expected[f"policy.model.{name}"]), name
    assert model.generation_config.temperature == 0.7
    assert (tmp_path / "policy" / "model.safetensors").is_file()
    assert (tmp_path / "policy" / "tokenizer.json").is_file()
    assert "rlbatch" not in json.dumps(json.loads((tmp_path / "policy" / "config.json").read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


@pytest.mark.parametrize("sharded", [False, True])
def test_command_exports_either_kind_of_checkpoint(sharded, tmp_path, capsys):
    tiny_llama(3).save_pretrained(tmp_path / "start")
    tokenizer().save_pretrained(tmp_path / "start")
    path = tmp_path / "trained.ckpt"

    def main(rank, size):
        options = {"strategy": RLBatchFSDPStrategy(save_distributed_checkpoint=sharded), "max_epochs": 1, "save_to": str(path)}
        return run(sft(policy=str(tmp_path / "start")), sft_data(), size, callbacks=(PretrainedExport(str(tmp_path / "end")),), **options)

    expected = run_distributed(main, 2, init_process_group=False)[0]["parameters"]
    assert export.main([str(path), str(tmp_path / "out")]) == 0
    for folder in ("out", "end"):  # data of token ids have no tokenizer: it is that of the model which training began from
        assert (tmp_path / folder / "tokenizer.json").is_file()
    size = sum(value.numel() for value in expected.values())
    assert f"{size:,} parameters written to" in capsys.readouterr().out
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        assert torch.equal(value, expected[f"policy.model.{name}"]), name
    assert export.main([str(path), str(tmp_path / "out"), "--prefix", "critic."]) == 1
    assert "only under ['policy']" in capsys.readouterr().err
    assert export.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 1


@pytest.mark.parametrize("sharded", [False, True])
def test_a_policy_with_adapters_leaves_as_the_plain_model_with_its_weights_merged(sharded, tmp_path):
    def main(rank, size):
        strategy = RLBatchFSDPStrategy(save_distributed_checkpoint=sharded)
        exporting = (PretrainedExport(str(tmp_path / "callback")),)
        run(
            sft(policy=adapted),
            sft_data(),
            size,
            strategy=strategy,
            max_epochs=1,
            callbacks=exporting,
            save_to=str(tmp_path / "checkpoint"),
        )

    run_distributed(main, 2, init_process_group=False)
    trained = adapted()
    start = {name: value.detach().clone() for name, value in trained.named_parameters()}
    state, _ = export.read_model(tmp_path / "checkpoint", "policy.model.")
    trained.load_state_dict(state)
    assert any(not torch.equal(value, start[name]) for name, value in trained.named_parameters() if "lora" in name)
    assert export.main([str(tmp_path / "checkpoint"), str(tmp_path / "command"), "--policy", "tests.rollout.low_rank.adapted"]) == 0
    ids = torch.arange(3, 12)[None]
    for folder in ("callback", "command"):
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        torch.testing.assert_close(model(ids).logits, trained(ids).logits, rtol=1e-4, atol=1e-5)


def test_command_line_knows_export(capsys):
    with pytest.raises(SystemExit) as stop:
        rlbatch(["export", "--help"])
    assert stop.value.code == 0
    assert "transformers folder" in capsys.readouterr().out
