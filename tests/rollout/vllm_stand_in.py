"""A stand-in for the ``vllm`` package: the calls and arguments that its documentation allows, around a toy model on the CPU.

It shows that VLLMEngine speaks vLLM's interface as documented, not that vLLM behaves so.
"""

import dataclasses
import os
import random
import types
from typing import Any

import numpy as np
import torch
from rollout_toys import toy_llama

from lightning_rlbatch.rollout.engine import RolloutRequest
from lightning_rlbatch.rollout.engine import SamplingParams as OurParams
from lightning_rlbatch.rollout.transformers_engine import TransformersEngine


@dataclasses.dataclass(kw_only=True)
class SamplingParams:
    """The arguments in use, with vLLM's defaults."""

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True


class LLM:
    """An engine in this process."""

    def __init__(
        self,
        model: str,
        *,
        tensor_parallel_size: int = 1,
        distributed_executor_backend: str | None = None,
        dtype: str = "auto",
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        enable_sleep_mode: bool = False,
        skip_tokenizer_init: bool = False,
        generation_config: str = "auto",
        logprobs_mode: str = "raw_logprobs",
        seed: int = 0,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        self.arguments = {name: value for name, value in locals().items() if name != "self"}
        assert distributed_executor_backend == "external_launcher"  # which reads these variables
        self.launched = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):  # as in processes that vLLM did not start
            set_seed(seed)
        assert torch.empty(0).dtype == torch.float32
        assert torch.empty(0).device.type == "cpu"
        self.model = toy_llama(0)
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.enable_sleep_mode = enable_sleep_mode
        self.model.load_weights = self._load_weights  # vLLM's models have this method

    def _load_weights(self, weights: Any) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            parameter = dict(self.model.named_parameters(remove_duplicate=False))[name]
            assert parameter.shape == tensor.shape
            with torch.no_grad():
                parameter.copy_(tensor)
            loaded.add(name)
        return loaded

    def apply_model(self, func: Any) -> list[Any]:
        assert "weights" not in self.asleep, "weights are asleep"
        return [func(self.model)]

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    def sleep(self, level: int = 1) -> None:
        assert self.enable_sleep_mode, "sleep mode is not enabled"
        self.calls.append(f"sleep({level})")
        self.asleep = {"weights", "kv_cache"}
        if level == 2:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake_up({tags})")
        self.asleep -= set(tags or ["weights", "kv_cache"])

    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: list[SamplingParams], *, use_tqdm: bool = True) -> list[Any]:
        assert not self.asleep, f"asleep: {self.asleep}"
        assert not use_tqdm
        outputs = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            assert params.ignore_eos
            assert not params.detokenize
            assert params.logprobs == 0
            assert params.top_k >= -1
            ours = OurParams(
                max_new_tokens=params.max_tokens or 16, temperature=params.temperature, top_k=max(params.top_k, 0), top_p=params.top_p,
                stop_token_ids=tuple(params.stop_token_ids or ()),
            )  # fmt: skip
            request = RolloutRequest(prompt["prompt_token_ids"], params.seed or 0)
            done = TransformersEngine(self.model, pad_token_id=0).generate([request], ours)[0]
            logprobs = [{t: types.SimpleNamespace(logprob=p, rank=1, decoded_token=None)} for t, p in zip(done.token_ids, done.log_probs)]
            output = types.SimpleNamespace(index=0, token_ids=tuple(done.token_ids), logprobs=logprobs, finish_reason=done.finish_reason)
            outputs.append(types.SimpleNamespace(outputs=[output]))
        return outputs


def module() -> types.ModuleType:
    stand_in = types.ModuleType("vllm")
    stand_in.LLM = LLM  # type: ignore[attr-defined]  # a module made by hand
    stand_in.SamplingParams = SamplingParams  # type: ignore[attr-defined]  # as above
    return stand_in
