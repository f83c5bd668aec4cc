"""Rollouts shared out over ranks and tensor-parallel groups: the same samples as one process alone, whatever the layout."""

import datetime
import random
import time
import weakref
from itertools import accumulate

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from hand_made import ScriptedEngine, ScriptedPPO, plain_log_probs, prompts, varied_reward
from helpers import ToyTokenizer, make_trainer, tiny_llama

from lightning_rlbatch.callbacks import RolloutCallback, RolloutRecorder
from lightning_rlbatch.data import RecordedRollouts, RolloutDataModule
from lightning_rlbatch.distributed import build_meshes
from lightning_rlbatch.functional import PackedBatch
from lightning_rlbatch.functional.sizes import iteration_sizes
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.rollout import RolloutRequest, SamplingParams, TransformersEngine
from lightning_rlbatch.rollout.dispatch import (
    check_tensor_parallel_size,
    contiguous_share,
    gather_requests,
    generate_together,
    tensor_parallel_group,
    tensor_parallel_ranks,
)
from lightning_rlbatch.rollout.weights import full_parameters
from lightning_rlbatch.strategies import RLBatchFSDPStrategy
from lightning_rlbatch.testing import run_distributed

LAYOUTS = [  # ranks, tensor-parallel size of rollouts, sequence-parallel size of training
    (1, 1, 1),
    (2, 1, 1),
    (2, 2, 1),
    (2, 1, 2),
    (2, 2, 2),
    (4, 1, 1),
    (4, 2, 1),
    (4, 1, 2),
    (4, 2, 2),
    (4, 4, 1),
]
SIZES = [(3, 3), (1, 1), (5, 2)]  # prompts, rollouts per prompt: fewer samples than ranks, and numbers that no layout divides


class SpanningEngine:
    """An engine that the ranks of a group share: checks that all got the same requests, generates every t-th and shares the results."""

    def __init__(self, engine, group):
        self.engine = engine
        self.group = group
        self.seen = []

    def generate(self, requests, sampling, on_progress=None):
        self.seen.append(list(requests))
        size, rank = (1, 0) if self.group is None else (self.group.size(), self.group.rank())
        own = self.engine.generate(requests[rank::size], sampling)
        if self.group is None:
            return own
        everyone = [None] * size
        dist.all_gather_object(everyone, (list(requests), own), group=self.group)
        assert all(others == list(requests) for others, _ in everyone), "ranks of a group got different requests"
        return [everyone[index % size][1][index // size] for index in range(len(requests))]

    def update_weights(self, weights):
        self.engine.update_weights(weights)

    def sleep(self):
        self.engine.sleep()

    def wake(self):
        self.engine.wake()


class SpanningPPO(PPOModule):
    def build_engine(self, model):
        return SpanningEngine(TransformersEngine.from_model(model, pad_token_id=0), self.rollout_group)


class Keep(RolloutCallback):
    def on_rollout_end(self, trainer, pl_module, rollouts):
        self.store = rollouts.store
        self.samples = rollouts.store.samples  # before later mini-batches move some of them


# -- a group's requests ------------------------------------------------------------------------------------------------------------------


def requests_of(rank, number):
    chance = random.Random(rank)
    return [
        RolloutRequest([chance.randrange(50) for _ in range(chance.randint(1, 5))], chance.randrange(2**63), chance.choice([None, 1, 7]))
        for _ in range(number)
    ]


def test_ranks_of_a_group_see_the_same_requests_in_the_order_of_the_ranks():
    cases = [(size, counts) for size in (1, 2, 4) for counts in ([2, 2, 2, 2], [3, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0])]

    def fn(rank, world_size):
        groups = {size: tensor_parallel_group(build_meshes("cpu"), size) for size in (1, 2, 4)}
        return [gather_requests(requests_of(rank, counts[rank]), groups[size]) for size, counts in cases]

    for rank, results in enumerate(run_distributed(fn, 4)):
        for (size, counts), (together, own) in zip(cases, results):
            ranks = tensor_parallel_ranks(rank, size)
            assert together == [request for other in ranks for request in requests_of(other, counts[other])], (size, counts)
            assert [together[index] for index in own] == requests_of(rank, counts[rank]), (size, counts)


def test_groups_are_neighbours_whatever_the_layout_of_training():
    cases = [(1, 2), (2, 2), (2, 4), (4, 2)]

    def fn(rank, world_size):
        meshes = {sp_size: build_meshes("cpu", sequence_parallel_size=sp_size) for sp_size in (1, 2, 4)}
        return [dist.get_process_group_ranks(tensor_parallel_group(meshes[sp_size], size)) for sp_size, size in cases]

    for rank, results in enumerate(run_distributed(fn, 4)):
        assert results == [tensor_parallel_ranks(rank, size) for _, size in cases]


def test_a_group_waits_no_longer_than_the_strategy_says():
    def fn(rank, world_size):
        meshes = build_meshes("cpu", timeout=datetime.timedelta(seconds=0.5))
        group = tensor_parallel_group(meshes, 2)
        if rank % 2:
            return 0.0  # its peer waits for it in vain
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.ones(1), group=group)
        return time.monotonic() - start

    waited = run_distributed(fn, 4)
    assert 0.4 < waited[0] < 10
    assert 0.4 < waited[2] < 10


def test_completions_come_back_to_the_rank_that_asked_and_progress_counts_its_own():
    def fn(rank, world_size):
        group = tensor_parallel_group(build_meshes("cpu"), 2)
        progress = []
        engine = SpanningEngine(ScriptedEngine(), group)
        own = requests_of(rank, 3 - rank)
        done = generate_together(engine, own, SamplingParams(100), group, lambda *counts: progress.append(counts))
        return done, progress

    for rank, (done, progress) in enumerate(run_distributed(fn, 2)):
        expected = ScriptedEngine().generate(requests_of(rank, 3 - rank), SamplingParams(100))
        assert done == expected
        assert progress == [(3 - rank, sum(len(completion.token_ids) for completion in expected))]


def test_engine_that_loses_a_completion_is_an_error_on_all_ranks_of_the_group():
    class Forgetful(ScriptedEngine):
        def generate(self, requests, sampling, on_progress=None):
            return super().generate(requests, sampling)[dist.get_rank() :]

    def fn(rank, world_size):
        group = tensor_parallel_group(build_meshes("cpu"), 2)
        with pytest.raises(RuntimeError) as raised:
            generate_together(Forgetful(), requests_of(rank, 2), SamplingParams(100), group)
        return str(raised.value)

    first, second = run_distributed(fn, 2)
    assert second == "Forgetful returned 3 completions for 4 requests."
    assert first.startswith("Rank 1 failed in phase 'tensor-parallel generation': RuntimeError: Forgetful returned 3")


@pytest.mark.parametrize(("world_size", "size"), [(4, 3), (2, 4), (1, 2), (4, 0)])
def test_size_that_does_not_divide_the_ranks_is_refused_with_both_numbers(world_size, size):
    with pytest.raises(ValueError, match=rf"rollout_tensor_parallel_size.*{size}") as raised:
        check_tensor_parallel_size(world_size, size)
    assert size == 0 or f"must divide the number of ranks, {world_size} " in str(raised.value)


@pytest.mark.parametrize(("prompts", "rollouts"), SIZES)
@pytest.mark.parametrize(("world_size", "size", "sp_size"), LAYOUTS)
def test_shares_are_those_that_the_sizes_of_an_iteration_promise(world_size, size, sp_size, prompts, rollouts):
    sizes = iteration_sizes(
        world_size=world_size, train_batch_size=prompts, rollouts_per_prompt=rollouts, mini_batch_size=prompts, micro_batch_size=1,
        sequence_parallel_size=sp_size, rollout_tensor_parallel_size=size,
    )  # fmt: skip
    shares = [len(contiguous_share(prompts * rollouts, world_size, rank)) for rank in range(world_size)]
    groups = [sum(shares[rank] for rank in tensor_parallel_ranks(first, size)) for first in range(0, world_size, size)]
    assert (min(shares), max(shares)) == sizes.rollouts_per_worker
    assert (min(groups), max(groups)) == sizes.rollouts_per_tp_group


# -- whole iterations ----------------------------------------------------------------------------------------------------------------------


def policy():
    return tiny_llama(dtype=torch.float32)


def telling_reward(prompts, completion_ids, log_metric):
    log_metric("length", sum(map(len, completion_ids)) / len(completion_ids))
    return varied_reward(prompts, completion_ids)


def data_module(prompts, rollouts):
    rows = [{"prompt": letter * (1 + index % 3)} for index, letter in enumerate("abcdefg")]
    return RolloutDataModule(
        lambda: rows, ToyTokenizer(), train_batch_size=prompts, mini_batch_size=prompts, rollouts_per_prompt=rollouts,
        max_tokens_per_rank=32, max_prompt_length=3, max_response_length=12, seed=3,
    )  # fmt: skip


def collect(rank, world_size, size, sp_size):
    """Return, for each number of prompts and rollouts, what this rank holds after the rollouts of an iteration and after its update."""
    results = []
    for num_prompts, rollouts in SIZES:
        module = SpanningPPO(policy, [telling_reward], rollout_tensor_parallel_size=size)
        keep = Keep()
        strategy = "auto" if world_size == 1 else RLBatchFSDPStrategy(sp_size)
        trainer = make_trainer(world_size, strategy, callbacks=[keep], max_epochs=1)
        trainer.fit(module, datamodule=data_module(num_prompts, rollouts))
        samples, table = keep.samples, keep.store.table
        rows = {
            int(index): {name: samples.split_per_sample(name)[place] for name in samples.per_token}
            | {name: samples[name][place] for name in samples.per_sample}
            for place, index in enumerate(samples["sample_id"])
        }
        results.append(
            {
                "rows": rows,
                "table": (table.lengths, table.rewards.tolist(), table.group_ids.tolist()),
                "seen": module.rollout_engine.seen,
                "bytes": keep.store.bytes_sent,
                "loss": float(trainer.logged_metrics["train/loss"]),
                "bytes_over_all": float(trainer.logged_metrics["perf/exchange_bytes"]),
                "mismatch": float(trainer.logged_metrics["kl/rollout_mismatch"]),
                "told": [float(trainer.logged_metrics[name]) for name in ("reward/log/length", "length/mean")],
            }
        )
    return results


@pytest.fixture(scope="module")
def alone():
    return run_distributed(collect, 1, 1, 1, init_process_group=False)[0]


@pytest.fixture(scope="module")
def everywhere():
    """What every rank holds in every layout; one set of processes per number of ranks walks its layouts."""

    def walk(rank, world_size):
        return {(size, sp_size): collect(rank, world_size, size, sp_size) for world, size, sp_size in LAYOUTS if world == world_size}

    return {world_size: run_distributed(walk, world_size, init_process_group=False) for world_size in (2, 4)}


@pytest.mark.parametrize(("world_size", "size", "sp_size"), LAYOUTS[1:])
def test_dispatch_gives_the_samples_of_one_process_alone(world_size, size, sp_size, alone, everywhere):
    for number, ((num_prompts, rollouts), expected) in enumerate(zip(SIZES, alone)):
        found = [rank[size, sp_size][number] for rank in everywhere[world_size]]
        total = num_prompts * rollouts
        for rank, result in enumerate(found):
            # The group's ranks were asked the same: their neighbours' shares, in order.
            group = tensor_parallel_ranks(rank, size)
            owned = [index for other in group for index in contiguous_share(total, world_size, other)]
            assert result["seen"] == [[expected["seen"][0][index] for index in owned]]
            assert result["table"] == expected["table"]  # lengths, rewards and group ids, in the order of the ids
            assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)
            assert result["mismatch"] < 1e-9
            assert result["told"] == pytest.approx(expected["told"])  # also where some ranks have no completion to tell of
            assert result["told"][0] == pytest.approx(result["told"][1])
            for index, row in result["rows"].items():
                reference = expected["rows"][index]
                for name in ("input_ids", "response_mask", "reward", "truncated"):
                    assert row[name].tolist() == reference[name].tolist(), (index, name)
                for name in ("old_log_probs", "rollout_log_probs", "advantages"):
                    torch.testing.assert_close(row[name], reference[name], atol=1e-5, rtol=1e-5)
        assert {result["bytes_over_all"] for result in found} == {sum(result["bytes"] for result in found)}
        # Sequence-parallel peers hold the same samples, data-parallel ranks different ones, and together they hold all.
        held = [sorted(result["rows"]) for result in found]
        assert all(held[rank] == held[rank - rank % sp_size] for rank in range(world_size))
        assert sorted(index for own in held[::sp_size] for index in own) == list(range(total))


def test_old_log_probs_of_the_trainer_are_those_of_the_engine(alone):
    for result in alone:
        for row in result["rows"].values():
            mask = row["response_mask"]
            torch.testing.assert_close(row["old_log_probs"][mask], row["rollout_log_probs"][mask], atol=1e-5, rtol=0)
            sample = PackedBatch.from_samples([{"input_ids": row["input_ids"], "response_mask": mask}])
            torch.testing.assert_close(row["old_log_probs"][mask].double(), plain_log_probs(sample, policy())[mask], atol=1e-5, rtol=1e-5)
        assert 0 <= result["mismatch"] < 1e-9


def test_only_samples_that_change_their_rank_are_sent():
    """Contiguous shares are what an unbalanced plan of equal sizes wants too, so nothing moves; balancing moves some."""

    def fn(rank, world_size):
        sent = []
        for balance in (False, True):
            data = RolloutDataModule(
                lambda: [{"prompt": letter} for letter in "ggaa"], ToyTokenizer(), train_batch_size=4, mini_batch_size=4,
                micro_batch_size=2, balance=balance, max_prompt_length=1, max_response_length=7, seed=0,
            )  # fmt: skip
            keep = Keep()
            make_trainer(world_size, callbacks=[keep], max_epochs=1).fit(ScriptedPPO(policy, [varied_reward]), datamodule=data)
            sent.append((keep.store.bytes_sent, sorted(keep.samples["sample_id"].tolist())))
        return sent

    ranks = run_distributed(fn, 2, init_process_group=False)
    assert [rank[0] for rank in ranks] == [(0, [0, 1]), (0, [2, 3])]
    # Each rank gets a long and a short one: one of 8 tokens goes, one of 2 tokens comes. Per field, padded to 16 bytes:
    # input_ids 8 per token, response_mask 1, rollout_log_probs 4; per sample reward, components, baseline, id 8, truncated 1.
    long, short = (64 + 16 + 32) + 5 * 16, (16 + 16 + 16) + 5 * 16
    assert [rank[1][0] for rank in ranks] == [long, short]
    assert [len({0, 1} & set(rank[1][1])) for rank in ranks] == [1, 1]


@pytest.mark.parametrize(("world_size", "sp_size"), [(2, 1), (4, 2)])
def test_logged_bytes_are_those_of_all_exchanges_of_the_iteration_over_all_ranks(world_size, sp_size, monkeypatch):
    """Counted where the bytes leave: in the first exchange, and in those of later epochs, whose mini-batches have other members."""
    sent = [0]
    original = dist.all_to_all_single

    def counted(output, given, *arguments, **options):
        sent[-1] += given.numel() if given.dtype == torch.uint8 else 0  # sequence parallelism moves floating-point numbers
        return original(output, given, *arguments, **options)

    class Steps(pl.Callback):
        def __init__(self):
            self.logged = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.logged.append(float(trainer.callback_metrics["perf/exchange_bytes"]))
            sent.append(0)

    def fn(rank, world_size):
        monkeypatch.setattr(dist, "all_to_all_single", counted)
        steps = Steps()
        data = RolloutDataModule(
            lambda: prompts("gafbec"), ToyTokenizer(), train_batch_size=6, mini_batch_size=3, ppo_epochs=3,
            max_tokens_per_rank=16, max_prompt_length=1, max_response_length=7,
        )  # fmt: skip
        trainer = make_trainer(world_size, RLBatchFSDPStrategy(sp_size), callbacks=[steps], max_epochs=2)
        trainer.fit(ScriptedPPO(policy, [varied_reward]), datamodule=data)
        return steps.logged, sent[:-1]

    ranks = run_distributed(fn, world_size, init_process_group=False)
    moved = [sum(rank_sent[step] for _, rank_sent in ranks) for step in range(12)]
    so_far = [*accumulate(moved[:6]), *accumulate(moved[6:])]
    assert all(logged == so_far for logged, _ in ranks)
    assert any(moved[1:6])
    assert so_far[5] > so_far[0] > 0


def test_engine_that_fails_on_one_rank_ends_all_ranks_with_its_error_and_finished_iterations_stay(tmp_path):
    class Failing(ScriptedEngine):
        calls = 0

        def generate(self, requests, sampling, on_progress=None):
            self.calls += 1
            if dist.get_rank() == 1 and self.calls == 2:
                raise RuntimeError("the GPU fell off the bus")
            return super().generate(requests, sampling)

    class FailingPPO(PPOModule):
        def build_engine(self, model):
            return Failing()

    def fn(rank, world_size, size):
        trainer = make_trainer(world_size, max_epochs=3, callbacks=[RolloutRecorder(str(tmp_path / str(size)))])
        module = FailingPPO(policy, [varied_reward], rollout_tensor_parallel_size=size)
        with pytest.raises(RuntimeError, match="the GPU fell off the bus") as raised:
            trainer.fit(module, datamodule=data_module(5, 2))
        return str(raised.value)

    for size in (1, 2):  # after a failure processes are not used again
        messages = run_distributed(fn, 4, size, init_process_group=False)
        assert messages[1] == "the GPU fell off the bus"
        assert all("Rank 1 failed" in message for rank, message in enumerate(messages) if rank != 1)
        recorded = RecordedRollouts(tmp_path / str(size))
        assert recorded.iterations == [0]
        assert recorded.read(0, 0, 1)["sample_id"].tolist() == list(range(10))


def test_embedded_engine_refuses_to_span_ranks_and_sizes_are_checked_before_a_model_is_made():
    def no_model():
        raise AssertionError("a model was made")

    def fn(rank, world_size, size, source):
        trainer, module = make_trainer(world_size, max_epochs=1), PPOModule(source, [varied_reward], rollout_tensor_parallel_size=size)
        with pytest.raises(ValueError, match=f"rollout_tensor_parallel_size={size}") as raised:
            trainer.fit(module, datamodule=data_module(1, 1))
        return str(raised.value)

    for message in run_distributed(fn, 2, 2, no_model, init_process_group=False):
        assert "TransformersEngineConfig serves one" in message
    for message in run_distributed(fn, 2, 3, no_model, init_process_group=False):
        assert "must divide the number of ranks, 2 " in message
    with pytest.raises(ValueError, match="rollout_tensor_parallel_size to be at least 1 but got 0"):
        PPOModule(policy, [varied_reward], rollout_tensor_parallel_size=0)


# -- weights -------------------------------------------------------------------------------------------------------------------------------


def test_one_gathered_parameter_is_alive_at_a_time_while_weights_are_synchronised():
    def fn(rank, world_size):
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(0)
        trained = tiny_llama(1)
        engine = TransformersEngine.from_model(trained, pad_token_id=0)
        expected = {name: parameter.detach().clone() + 1 for name, parameter in trained.named_parameters()}
        for parameter in trained.parameters():
            parameter.data += 1
        mesh = build_meshes("cpu").fsdp
        for layer in trained.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(trained, mesh=mesh)
        alive, most = [], []

        def watched(stream):
            while (pair := next(stream, None)) is not None:
                alive.append(weakref.ref(pair[1]))
                yield pair
                del pair
                deadline = time.monotonic() + 2.0  # gloo's thread lets go a moment after its work is done
                while (left := sum(reference() is not None for reference in alive)) and time.monotonic() < deadline:
                    time.sleep(0.001)
                most.append(left)

        engine.update_weights(watched(full_parameters(trained)))
        for name, parameter in engine.model.named_parameters():
            torch.testing.assert_close(parameter, expected[name], atol=0, rtol=0)
        return most

    for most in run_distributed(fn, 2):
        assert len(most) == len(list(tiny_llama().parameters()))
        assert max(most) == 0  # whenever one is asked for, none of those before it is left
