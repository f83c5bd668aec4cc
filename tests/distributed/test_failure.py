import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from lightning_rlbatch.distributed.exchange import exchange_samples
from lightning_rlbatch.distributed.failure import PeerFailedError, fail_together
from lightning_rlbatch.distributed.mesh import build_meshes
from lightning_rlbatch.distributed.reductions import all_reduce_sums
from lightning_rlbatch.functional.packing import PackedBatch
from lightning_rlbatch.testing import run_distributed


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def outcome(group, phase, error):
    """Run a phase that raises `error` if it is not None, and say how it ended here."""
    try:
        with fail_together(group, phase):
            if error is not None:
                raise error
    except BaseException as caught:
        return type(caught).__name__, str(caught) if not isinstance(caught, UnprintableError) else "", str(caught.__cause__)
    return None


def test_a_lone_process_raises_its_own_error():
    assert outcome(None, "rewards", KeyError("x")) == ("KeyError", "'x'", "None")
    assert outcome(None, "rewards", None) is None


def test_stop_iteration_in_a_phase_becomes_an_error_that_no_loop_takes_for_the_end_of_its_data():
    def fail(rank, world_size):
        return outcome(dist.group.WORLD, "rewards", StopIteration("rows") if rank == 1 else None)

    kind, text, cause = outcome(None, "rewards", StopIteration("rows"))
    assert (kind, cause) == ("RuntimeError", "rows")
    assert text == "Phase 'rewards' raised StopIteration (rows): an iterator that its code reads by next() is at its end."
    others, own = run_distributed(fail, 2)
    assert own == (kind, text, cause)
    assert others[:2] == ("PeerFailedError", f"Rank 1 failed in phase 'rewards': RuntimeError: {text}")


def test_nothing_happens_when_all_ranks_succeed():
    def succeed(rank, world_size):
        ends = [outcome(dist.group.WORLD, f"phase {number}", None) for number in range(3)]
        value = torch.ones(1)
        dist.all_reduce(value)  # the ranks are still in step
        return ends, value.item()

    assert run_distributed(succeed, 4) == [([None] * 3, 4.0)] * 4


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_an_error_on_one_rank_is_named_on_all_others(failing):
    def fail(rank, world_size):
        end = outcome(dist.group.WORLD, "rewards", ValueError("reward is nan") if rank == failing else None)
        again = outcome(dist.group.WORLD, "after the error", None)  # a caller may catch it and go on
        return end, again

    results = run_distributed(fail, 4)
    assert [again for _, again in results] == [None] * 4
    for rank, (end, _) in enumerate(results):
        if rank == failing:
            assert end == ("ValueError", "reward is nan", "None")
        else:
            assert end[:2] == ("PeerFailedError", f"Rank {failing} failed in phase 'rewards': ValueError: reward is nan")
            assert f"Traceback of rank {failing}" in end[2]
            assert "raise error" in end[2]
    assert issubclass(PeerFailedError, RuntimeError)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("x" * 10**6), UnprintableError(), ValueError("\ud800")])
def test_any_kind_of_error_or_interrupt_reaches_the_others(error):
    def fail(rank, world_size):
        return outcome(dist.group.WORLD, "generation", error if rank == 1 else None)

    others, own = run_distributed(fail, 2)
    assert own[0] == type(error).__name__
    assert others[0] == "PeerFailedError"
    assert f"Rank 1 failed in phase 'generation': {type(error).__name__}" in others[1]
    assert len(others[1]) < 3000


def test_several_failures_keep_their_own_errors_and_name_each_other():
    def fail(rank, world_size):
        return outcome(dist.group.WORLD, "loss", [None, KeyError("a"), ValueError("b"), None][rank])

    ends = run_distributed(fail, 4)
    assert [end[0] for end in ends] == ["PeerFailedError", "KeyError", "ValueError", "PeerFailedError"]
    assert ends[0][1] == "Rank 1 failed in phase 'loss' (so did ranks 2): KeyError: 'a'"


def test_a_failure_inside_a_sub_group_names_the_global_rank():
    def fail(rank, world_size):
        meshes = build_meshes("cpu", sequence_parallel_size=2)
        return outcome(meshes.sp_group, "tokenize", OSError("no such file") if rank == 3 else None)

    ends = run_distributed(fail, 4)
    assert ends[:2] == [None, None]
    assert ends[2][1].startswith("Rank 3 failed in phase 'tokenize': OSError")
    assert ends[3][0] == "OSError"


def test_ranks_in_different_phases_all_learn_it():
    def diverge(rank, world_size):
        return outcome(dist.group.WORLD, "update" if rank == 1 else "reference", None)

    for kind, message, _ in run_distributed(diverge, 3):
        assert kind == "PeerFailedError"
        assert "rank 0: 'reference'; rank 1: 'update'; rank 2: 'reference'" in message


def test_a_killed_rank_ends_the_phase_of_the_others_within_seconds():
    def killed(rank, world_size):
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        kind, message, _ = outcome(dist.group.WORLD, "generation", None)
        assert kind == "RuntimeError"
        assert "lost" in message
        assert "'generation'" in message
        assert time.monotonic() - started < 10

    with pytest.raises(AssertionError) as caught:
        run_distributed(killed, 3, pg_timeout=5)
    assert "1 of 3 ranks failed" in str(caught.value)
    assert "rank 1: died" in str(caught.value)


def test_an_error_survives_a_peer_that_never_answers():
    def fail(rank, world_size):
        if rank == 1:
            time.sleep(3)
            return None
        started = time.monotonic()
        end = outcome(dist.group.WORLD, "rewards", ValueError("the cause"))
        assert time.monotonic() - started < 8
        return end

    assert run_distributed(fail, 2, pg_timeout=1)[0][:2] == ("ValueError", "the cause")


PHASES = ("rewards", "log-probs", "loss")
FAULTS = {
    "raise": lambda: (_ for _ in ()).throw(ValueError("the cause")),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt()),
    "exit": lambda: sys.exit(1),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "out of memory": lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("tried to allocate 2 GiB")),
}
NAMES = {"raise": "ValueError", "interrupt": "KeyboardInterrupt", "exit": "SystemExit", "out of memory": "OutOfMemoryError"}


def iteration(group, fault):
    """Run the phases of a small iteration with the collectives between them; `fault` maps a phase to what happens in it here."""
    reached = []

    def enter(phase):
        reached.append(phase)
        fault.get(phase, lambda: None)()

    lengths = [3, 5, 2][: 1 + group.rank()]
    batch = PackedBatch.from_samples([{"input_ids": list(range(length))} for length in lengths])
    try:
        with fail_together(group, "rewards"):
            enter("rewards")
        batch, route = exchange_samples(batch, [0] * batch.num_samples, group)
        with fail_together(group, "log-probs"):
            enter("log-probs")
        route.back(batch["input_ids"])
        with fail_together(group, "loss"):
            enter("loss")
        all_reduce_sums({"loss": 1.0}, group)
    except BaseException as caught:
        return reached, type(caught).__name__, str(caught)
    return reached, None, ""


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [*FAULTS])
@pytest.mark.parametrize("failing", [0, 2])
def test_any_fault_in_any_phase_ends_every_rank_in_that_phase(phase, kind, failing):
    def run(rank, world_size):
        started = time.monotonic()
        reached, error, message = iteration(dist.group.WORLD, {phase: FAULTS[kind]} if rank == failing else {})
        assert time.monotonic() - started < 5
        if kind == "kill":  # the parent sees the killed rank's missing result; what the others saw is checked here
            assert (reached[-1], error) == (phase, "RuntimeError")
            assert f"lost, or runs something else, at the end of phase '{phase}'" in message
        return reached[-1], error, message

    if kind == "kill":
        with pytest.raises(AssertionError, match="1 of 3 ranks failed") as caught:
            run_distributed(run, 3, pg_timeout=5, timeout=30)
        assert f"rank {failing}: died" in str(caught.value)
        return
    for rank, (last, error, message) in enumerate(run_distributed(run, 3, pg_timeout=5, timeout=30)):
        assert last == phase
        if rank == failing:
            assert error == NAMES[kind]
        else:
            assert error == "PeerFailedError"
            assert message.startswith(f"Rank {failing} failed in phase '{phase}': {NAMES[kind]}")


def test_a_rank_that_fails_between_phases_still_ends_the_others_within_seconds():
    def run(rank, world_size):
        if rank == 1:
            raise ValueError("outside of any phase")
        started = time.monotonic()
        _, error, _ = iteration(dist.group.WORLD, {})
        assert error == "RuntimeError"
        assert time.monotonic() - started < 8

    with pytest.raises(AssertionError, match="1 of 3 ranks failed") as caught:
        run_distributed(run, 3, pg_timeout=5, timeout=30)
    assert "outside of any phase" in str(caught.value)
