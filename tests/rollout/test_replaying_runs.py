"""A run that was recorded is served again by the replay engine, to the requests of the same run."""

import json
import math
import shutil

import pytest
from hand_made import ScriptedPPO, prompts, varied_reward
from helpers import ToyTokenizer, make_trainer, tiny_llama

from lightning_rlbatch.callbacks import RolloutCallback
from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.data.recording import RecordingFile, file_name, save_rollouts
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.rollout import (
    Completion,
    EngineContext,
    ReplayEngine,
    ReplayEngineConfig,
    RolloutRequest,
    SamplingParams,
    rollout_seed,
)
from lightning_rlbatch.testing import run_distributed

SIZES = {"train_batch_size": 3, "mini_batch_size": 3, "rollouts_per_prompt": 2, "max_prompt_length": 1, "max_response_length": 16}


def one_reply(turns, turn):
    return ["ab" if turn == 0 else None for _ in turns]


class Samples(RolloutCallback):
    def __init__(self):
        self.seen = {}

    def on_rollout_end(self, trainer, pl_module, rollouts):
        samples = rollouts.store.samples
        names = ("input_ids", "response_mask", "rollout_log_probs")
        for place, number in enumerate(samples["sample_id"].tolist()):
            self.seen[rollouts.iteration, number] = [samples.split_per_sample(name)[place].tolist() for name in names]


def rolled_out(world_size, make):
    def fn(rank, size):
        samples = Samples()
        data = RolloutDataModule(lambda: prompts("bcde"), ToyTokenizer(), max_tokens_per_rank=20, seed=4, **SIZES)
        make_trainer(size, max_epochs=2, callbacks=[samples]).fit(make(), datamodule=data)
        return samples.seen

    return {key: value for seen in run_distributed(fn, world_size, init_process_group=False) for key, value in seen.items()}


def test_a_recorded_run_is_served_again_turn_by_turn_on_any_ranks(tmp_path):
    path = str(tmp_path / "recorded")
    options = {"environment": one_reply, "drop_truncated": True}
    recorded = rolled_out(2, lambda: ScriptedPPO(tiny_llama, [varied_reward], record_rollouts=path, **options))
    assert len(recorded) == 12
    assert all(
        [False, True] in [mask[i : i + 2] for i in range(1, len(mask))] for _, mask, _ in recorded.values()
    )  # replies lie in between
    for world_size in (1, 2):
        engine = ReplayEngineConfig(path=path)
        assert (
            rolled_out(world_size, lambda engine=engine: PPOModule(tiny_llama, [varied_reward], rollout_engine=engine, **options))
            == recorded
        )


def test_what_is_no_recording_is_refused_before_a_model_is_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        ReplayEngineConfig(path=str(tmp_path / "none")).check(EngineContext())
    (tmp_path / "iteration_000000.incomplete").mkdir()
    (tmp_path / "iteration_000000.incomplete" / "rank_00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no .safetensors, .jsonl or .parquet file"):
        ReplayEngineConfig(path=str(tmp_path)).check(EngineContext())
    with pytest.raises(ValueError, match="ReplayEngineConfig serves one"):
        ReplayEngineConfig(path=str(tmp_path)).check(EngineContext(tensor_parallel_size=2))
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no whole safetensors file"):
        ReplayEngine.from_file(tmp_path)


def test_folders_are_read_in_order_and_token_ids_may_have_the_names_of_dumps(tmp_path):
    for number in (10, 9):
        rows = [{"prompt_ids": [3, 4], "completion_ids": [number, place], "log_probs": None} for place in range(2)]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = ReplayEngine.from_file(tmp_path)
    served = [engine.generate([RolloutRequest([3, 4], seed)], SamplingParams(8))[0] for seed in range(4)]
    assert [completion.token_ids for completion in served] == [[9, 0], [9, 1], [10, 0], [10, 1]]
    assert all(math.isnan(value) for completion in served for value in completion.log_probs)


def test_seeds_of_a_recording_are_those_of_the_requests(tmp_path):
    path = tmp_path / "recorded"
    recorded = rolled_out(1, lambda: ScriptedPPO(tiny_llama, [varied_reward], record_rollouts=str(path)))
    engine = ReplayEngine.from_file(path)
    ids, _, log_probs = recorded[1, 3]  # the second rollout of the second prompt of the second iteration
    request = RolloutRequest(ids[:1], rollout_seed(4, 1, 1, 1))
    expected = Completion(ids[1:], log_probs[1:], "stop")
    assert engine.generate([request], SamplingParams(16)) == [expected]
    shutil.copytree(path / "iteration_000001", path / "iteration_000001.1")  # a resumed run has sampled the prompts again
    first = RecordingFile(path / "iteration_000001" / file_name(0))
    samples = first.load()
    save_rollouts(first.path, samples.with_fields(per_token={"input_ids": samples["input_ids"].clamp(max=9)}), first.header)
    assert ReplayEngine.from_file(path).generate([request], SamplingParams(16)) == [expected]
