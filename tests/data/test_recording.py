import json
from types import SimpleNamespace

import pytest
import torch
from helpers import CharacterCodes
from safetensors.torch import load_file, save_file

from lightning_rlbatch.callbacks import recorder as recorder_module
from lightning_rlbatch.callbacks.recorder import RecordingFolder, RolloutRecorder, recorded_samples
from lightning_rlbatch.callbacks.rollout_hooks import RolloutCallback, Rollouts, call_on_rollout_end
from lightning_rlbatch.data.batching import BatchingOptions
from lightning_rlbatch.data.prompts import PromptBatch
from lightning_rlbatch.data.recording import RecordedRollouts, RecordingHeader, save_rollouts
from lightning_rlbatch.data.store import RolloutStore, gather_table
from lightning_rlbatch.distributed.mesh import build_meshes, data_parallel_meshes, single_process_meshes
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.rollout.dispatch import contiguous_share
from lightning_rlbatch.testing import run_distributed

ROLLOUTS = 3
NO_VERDICT = 4  # the rollout whose reward is missing


def sample(group, rollout, salt=0):
    generator = torch.Generator().manual_seed(1000 * salt + 10 * group + rollout)
    length = int(torch.randint(2, 9, (), generator=generator))
    values = torch.rand(length, generator=generator)
    return {
        "input_ids": torch.randint(97, 122, (length,), generator=generator),
        "response_mask": torch.arange(length) >= 1,
        "rollout_log_probs": -values,
        "old_log_probs": -values - 0.1,
        "advantages": values - 0.5,
    }


def make_rollouts(meshes, positions, iteration=0, salt=0):
    """Rollouts of prompts at these positions; the content of each depends on its position, number and salt only."""
    prompts = PromptBatch(
        prompts=[f"p{position}" for position in positions],
        prompt_ids=[[112, 48 + position] for position in positions],
        columns=[{} for _ in positions],
        positions=list(positions),
        rollouts_per_prompt=ROLLOUTS,
        max_response_length=8,
        tokenizer=CharacterCodes(),
        seed=7,
    )
    rows = []
    for index in contiguous_share(prompts.num_samples, meshes.world_size, meshes.rank):
        group, rollout = positions[index // ROLLOUTS], index % ROLLOUTS
        reward = float("nan") if index == NO_VERDICT else float(group * 10 + rollout)
        rest = {"reward": torch.tensor(reward, dtype=torch.float64), "truncated": torch.tensor(False), "sample_id": index}
        rows.append({**sample(group, rollout, salt), **rest})
    samples = PackedBatch.from_samples(rows)
    table = gather_table(samples, torch.tensor(positions).repeat_interleave(ROLLOUTS), ROLLOUTS, meshes)
    members = [table.ids_of_prompts(range(len(positions)))]
    store = RolloutStore(samples, table, members, BatchingOptions(max_tokens_per_rank=32), meshes)
    return Rollouts(store, prompts, iteration)


def trainer_of(meshes, mini_batch=0, num_prompts=2):
    data = SimpleNamespace(position=SimpleNamespace(mini_batch=mini_batch), train_batch_size=num_prompts)
    return SimpleNamespace(strategy=None, world_size=meshes.world_size, local_rank=meshes.rank, datamodule=data, callbacks=[])


def record(folder, positions, iteration=0, salt=0, mini_batch=0, meshes=None, num_prompts=None, **options):
    meshes = meshes or single_process_meshes()
    rollouts = make_rollouts(meshes, positions, iteration, salt)
    trainer = trainer_of(meshes, mini_batch, num_prompts or len(positions))
    RolloutRecorder(str(folder), **options).on_rollout_end(trainer, None, rollouts)


def content(samples):
    """Everything about each sample, by id."""
    fields = {name: samples.split_per_sample(name) for name in samples.per_token}
    return {
        index: {name: parts[row].tolist() for name, parts in fields.items()} | {"reward": samples["reward"][row].item()}
        for row, index in enumerate(samples["sample_id"].tolist())
    }


def expected(positions, salt=0, all_positions=None):
    """The recorded content of prompts, from the definition of the samples."""
    rewarded = {}
    for group in positions:
        for rollout in range(ROLLOUTS):
            if (all_positions or positions).index(group) * ROLLOUTS + rollout != NO_VERDICT:
                fields = {name: value.tolist() for name, value in sample(group, rollout, salt).items()}
                rewarded[group * ROLLOUTS + rollout] = fields | {"reward": group * 10.0 + rollout}
    return rewarded


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_reads_every_rewarded_rollout_of_two_ranks_exactly_once(tmp_path, world_size):
    run_distributed(lambda rank, world: record(tmp_path, [0, 1, 2, 3, 4], meshes=data_parallel_meshes()), 2)
    recorded = RecordedRollouts(tmp_path)
    shares = [recorded.read(0, rank, world_size) for rank in range(world_size)]
    found = [content(share) for share in shares]
    assert sum(map(len, found)) == 5 * ROLLOUTS - 1
    assert {index: fields for part in found for index, fields in part.items()} == expected([0, 1, 2, 3, 4])
    assert all(share.schema.keys() == recorded.schema(0).keys() for share in shares)  # a rank without a file too
    assert all(share["sample_id"].tolist() == sorted(share["sample_id"].tolist()) for share in shares)
    assert (recorded.iterations, recorded.num_prompts, recorded.rollouts_per_prompt(0), recorded.seed(0)) == ([0], 5, ROLLOUTS, 7)


def test_a_file_is_readable_without_this_package(tmp_path):
    record(tmp_path, [0, 1])
    fields = load_file(tmp_path / "iteration_000000" / "rank_00000.safetensors")
    assert fields["cu_seqlens"][-1] == len(fields["input_ids"])
    assert fields["group_id"].tolist() == [0, 0, 0, 1, 1]  # one has no reward
    assert fields["reward"].tolist() == [0.0, 1.0, 2.0, 10.0, 12.0]


@pytest.mark.parametrize("prompt_texts", [True, False])
def test_texts_of_prompts_are_recorded_on_request(tmp_path, prompt_texts):
    from lightning_rlbatch.data.recording import RecordingFile

    record(tmp_path, [2, 5], prompt_texts=prompt_texts)
    header = RecordingFile(tmp_path / "iteration_000000" / "rank_00000.safetensors").header
    assert header.prompts == ({"2": "p2", "5": "p5"} if prompt_texts else None)


def test_every_nth_iteration_is_recorded(tmp_path):
    for iteration in range(5):
        record(tmp_path, [0, 1], iteration, every_n_iterations=2)
    assert RecordedRollouts(tmp_path).iterations == [0, 2, 4]
    with pytest.raises(ValueError, match="every_n_iterations to be at least 1 but got 0"):
        RolloutRecorder("x", every_n_iterations=0)


def test_tensors_that_share_memory_are_recorded(tmp_path):
    rollouts = make_rollouts(single_process_meshes(), [0, 1])
    rollouts.store.update(per_token={"returns": rollouts.store.samples["advantages"]})
    RolloutRecorder(str(tmp_path)).on_rollout_end(trainer_of(single_process_meshes()), None, rollouts)
    samples = RecordedRollouts(tmp_path).read(0, 0, 1)
    assert torch.equal(samples["returns"], samples["advantages"])


def test_sequence_parallel_peers_write_their_samples_once(tmp_path):
    def write(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=2)
        rollouts = make_rollouts(meshes, [0, 1])
        samples = recorded_samples(rollouts.store.samples, [0, 1], ROLLOUTS)
        header = RecordingHeader(0, meshes.dp_rank, meshes.dp_size, 2, (0, 1), ROLLOUTS, 7)
        RecordingFolder(tmp_path, meshes, rank).save(samples, header, is_part=False)

    run_distributed(write, 2)
    assert [path.name for path in (tmp_path / "iteration_000000").iterdir()] == ["rank_00000.safetensors"]
    assert content(RecordedRollouts(tmp_path).read(0, 0, 1)) == expected([0, 1])


def test_a_rank_that_cannot_write_ends_all_ranks_and_leaves_finished_iterations_intact(tmp_path, monkeypatch):
    def write(rank, world_size):
        meshes = data_parallel_meshes()
        record(tmp_path, [0, 1, 2], meshes=meshes)
        original = save_rollouts

        def full_disk(path, samples, header):
            if rank == 1:
                path.with_name("half").write_text("half a file")
                raise OSError("No space left on device")
            original(path, samples, header)

        recorder_module.save_rollouts = full_disk
        try:
            record(tmp_path, [0, 1, 2], iteration=1, salt=1, meshes=meshes)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        recorder_module.save_rollouts = original
        return message

    messages = run_distributed(write, 2)
    assert messages[1] == "OSError: No space left on device"
    assert messages[0].startswith("PeerFailedError: Rank 1 failed in phase 'recording rollouts'")
    recorded = RecordedRollouts(tmp_path)
    assert recorded.iterations == [0]
    assert content(recorded.read(0, 0, 1)) == expected([0, 1, 2])
    # The next attempt finds the remains and is not confused by them.
    run_distributed(lambda rank, world: record(tmp_path, [0, 1, 2], iteration=1, salt=2, meshes=data_parallel_meshes()), 2)
    assert content(RecordedRollouts(tmp_path).read(1, 0, 1)) == expected([0, 1, 2], salt=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_000000", "iteration_000001"]


def test_a_resume_inside_an_iteration_replaces_the_prompts_that_were_rolled_out_again(tmp_path):
    record(tmp_path, [0, 1, 2, 3])
    record(tmp_path, [1, 3], salt=1, mini_batch=2, num_prompts=4)
    record(tmp_path, [3], salt=2, mini_batch=3, num_prompts=4)
    recorded = RecordedRollouts(tmp_path)
    assert recorded.num_prompts == 4
    newest = expected([0, 2], all_positions=[0, 1, 2, 3]) | expected([1], salt=1, all_positions=[1, 3]) | expected([3], salt=2)
    assert content(recorded.read(0, 0, 1)) == newest
    assert content(recorded.read(0, 0, 2)) | content(recorded.read(0, 1, 2)) == newest


def test_parts_of_different_runs_are_an_error(tmp_path):
    record(tmp_path, [0, 1, 2, 3])
    record(tmp_path, [1], salt=1, mini_batch=2, num_prompts=6)
    with pytest.raises(ValueError, match=r"iteration_000000 and iteration_000000.1 beside it differ in prompts per iteration"):
        RecordedRollouts(tmp_path)


def test_an_iteration_that_the_trainer_cuts_short_keeps_its_number_of_prompts(tmp_path):
    record(tmp_path, [0, 2], num_prompts=5)
    assert RecordedRollouts(tmp_path).num_prompts == 5


def test_a_run_that_starts_over_sets_the_later_iterations_of_the_earlier_run_aside(tmp_path):
    for iteration in range(4):
        record(tmp_path, [0, 1], iteration)
    with pytest.warns(UserWarning, match="held 3 rollout folders of an earlier run from iteration 1 on"):
        record(tmp_path, [0, 1], iteration=1, salt=5)
    recorded = RecordedRollouts(tmp_path)
    assert recorded.iterations == [0, 1]
    assert content(recorded.read(1, 0, 1)) == expected([0, 1], salt=5)
    assert sorted(path.name for path in tmp_path.glob("superseded*")) == [f"superseded_0_iteration_00000{i}" for i in (1, 2, 3)]


def test_a_folder_without_recordings_is_an_error_that_says_what_is_there(tmp_path):
    with pytest.raises(ValueError, match=r"expected folders such as iteration_000000, but it is empty.*RolloutRecorder"):
        RecordedRollouts(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder"):
        RecordedRollouts(tmp_path / "nowhere")
    (tmp_path / "iteration_000000.incomplete").mkdir()
    with pytest.raises(ValueError, match=r"it holds iteration_000000.incomplete"):
        RecordedRollouts(tmp_path)


def test_a_missing_file_of_a_rank_is_an_error_that_names_it(tmp_path):
    run_distributed(lambda rank, world: record(tmp_path, [0, 1, 2], iteration=3, meshes=data_parallel_meshes()), 2)
    (tmp_path / "iteration_000003" / "rank_00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"iteration_000003 lacks rank_00001.safetensors: it was recorded by 2 ranks but 1 files"):
        RecordedRollouts(tmp_path)
    (tmp_path / "iteration_000003" / "rank_00000.safetensors").unlink()
    with pytest.raises(ValueError, match="iteration_000003 has no files"):
        RecordedRollouts(tmp_path)


@pytest.mark.parametrize("damage", ["fields", "run", "half", "foreign", "version"])
def test_files_that_do_not_fit_are_an_error_that_names_them(tmp_path, damage):
    samples = make_rollouts(single_process_meshes(), [0, 1]).store.samples
    samples = recorded_samples(samples, [0, 1], ROLLOUTS)
    folder = tmp_path / "iteration_000000"
    folder.mkdir()
    header = RecordingHeader(0, 0, 2, 2, (0, 1), ROLLOUTS, 7)
    save_rollouts(folder / "rank_00000.safetensors", samples, header)
    other = folder / "rank_00001.safetensors"
    changed = samples.without_fields(["advantages"]) if damage == "fields" else samples
    save_rollouts(other, changed, RecordingHeader(0, 1, 2, 2, (0, 1), ROLLOUTS, 8 if damage == "run" else 7))
    if damage == "half":
        other.write_bytes(other.read_bytes()[:-20])
    if damage in ("foreign", "version"):
        save_file({"weight": torch.zeros(1), "cu_seqlens": torch.zeros(1)}, other, {"format": "pt"})
    if damage == "version":
        save_file({"cu_seqlens": torch.zeros(1)}, other, {"format": "lightning_rlbatch.rollouts", "version": "99"})
    message = {
        "fields": r"rank_00001.safetensors does not fit rank_00000.safetensors beside it: field 'advantages' is missing",
        "run": r"rank_00001.safetensors does not fit .* they are of different runs",
        "half": r"rank_00001.safetensors is no whole safetensors file",
        "foreign": r"rank_00001.safetensors is no file of recorded rollouts: its format is 'pt'",
        "version": r"rank_00001.safetensors has version 99 of the format but this package reads 1",
    }[damage]
    with pytest.raises(ValueError, match=message):
        RecordedRollouts(tmp_path)


def test_the_hook_reaches_callbacks_that_have_it_in_order():
    seen = []

    class Watcher(RolloutCallback):
        def __init__(self, name):
            self.name = name

        def on_rollout_end(self, trainer, pl_module, rollouts):
            seen.append((self.name, rollouts.iteration, pl_module))

    duck = SimpleNamespace(on_rollout_end=lambda trainer, pl_module, rollouts: seen.append(("duck", rollouts.iteration, pl_module)))
    trainer = SimpleNamespace(callbacks=[Watcher("first"), object(), duck, RolloutCallback()])
    call_on_rollout_end(trainer, "module", make_rollouts(single_process_meshes(), [0, 1], iteration=9))
    assert seen == [("first", 9, "module"), ("duck", 9, "module")]


def test_texts_are_those_of_the_samples_prompts_and_responses():
    rollouts = make_rollouts(single_process_meshes(), [3, 1])
    texts = rollouts.texts()
    assert [prompt for prompt, _ in texts] == ["p3", "p3", "p3", "p1", "p1"]
    assert texts[0][1] == CharacterCodes().decode(sample(3, 0)["input_ids"][1:].tolist())
    assert rollouts.texts(2) == texts[:2]
    assert json.dumps(texts)
