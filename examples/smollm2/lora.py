"""GRPO of low-rank adapters: a policy with LoRA layers inside."""

from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel


def lora_policy(folder: str = "outputs/smollm2/policy", rank: int = 16) -> PreTrainedModel:
    """Return the pretrained model with LoRA adapters in its attention and MLP; only they are trained.

    The adapters are put into the model rather than around it, so that it stays a transformers model, which packed attention needs.

    Args:
        folder: Of the pretrained model.
        rank: Of the adapters.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model  # not among the package's own dependencies

    model = AutoModelForCausalLM.from_pretrained(Path(folder), dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    # The second matrix starts at zero, so the policy starts as the pretrained model; the first is drawn from the run's seed.
    adapted: PreTrainedModel = inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
    return adapted
