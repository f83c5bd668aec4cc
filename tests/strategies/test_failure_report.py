"""A rank whose main thread waits in native code, where no exception reaches it, ends all the same; and only if the run is not over."""

import ctypes
import os
import signal
import sys
import time
import warnings
from datetime import timedelta

import torch.distributed as dist

from lightning_rlbatch.strategies.failure import FailureReport
from lightning_rlbatch.strategies.guarded import Guarded
from lightning_rlbatch.testing.distributed import free_port

GRACE = 0.5  # seconds that a rank gets to end by itself
LONG = 40.0


def sleep_in_native_code(seconds):
    ctypes.CDLL(None).usleep(int(seconds * 1e6))


class Strategy:
    failure_report = None

    def join_saves(self, timeout):
        pass


def guarded_rank(rank, port, files, main):
    """Run a function like a Trainer's; write its result, or the error, or what this process says before it ends itself."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    group = dist.new_group(timeout=timedelta(seconds=3))
    sys.stderr = files[rank].open("w")
    strategy = Strategy()
    strategy.failure_report = FailureReport(rank, 2, "run", patience=1.0, grace=GRACE)
    try:
        said = Guarded(strategy, main)(rank, strategy.failure_report, group)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    print(said, file=sys.stderr, end="", flush=True)


def two_ranks(tmp_path, cases):
    """Run a function on two forked ranks per case, all at once; return by case what each rank wrote, and how it ended."""
    children = {}
    for name, main in cases.items():
        files, port = [tmp_path / f"{name} {rank}" for rank in range(2)], free_port()
        for rank in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
                child = os.fork()
            if child == 0:
                try:
                    guarded_rank(rank, port, files, main)
                finally:
                    os._exit(0)
            children[name, rank] = (child, files[rank])
    deadline, results = time.monotonic() + LONG / 2, {}
    while len(results) < len(children) and time.monotonic() < deadline:
        time.sleep(0.05)
        for key, (child, file) in children.items():
            if key not in results and os.waitpid(child, os.WNOHANG)[0]:
                results[key] = file.read_text() if file.exists() else ""
    for key in children.keys() - results.keys():
        os.kill(children[key][0], signal.SIGKILL)
        os.waitpid(children[key][0], 0)
    assert results.keys() == children.keys(), f"still running: {sorted(children.keys() - results.keys())}"
    return results


def rank_zero_is_killed(rank, report, group):
    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    sleep_in_native_code(LONG)


def rank_zero_hangs(rank, report, group):
    if rank == 0:
        sleep_in_native_code(LONG)
    report.meet(group)


def rank_one_hangs(rank, report, group):
    if rank == 1:
        sleep_in_native_code(LONG)
    report.meet(group)


def rank_one_fails_while_rank_zero_waits_in_native_code(rank, report, group):
    if rank == 1:
        raise KeyError("boom")
    sleep_in_native_code(LONG)


def rank_one_fails_before_it_meets(rank, report, group):
    if rank == 1:
        time.sleep(0.5)
        raise KeyError("boom")
    start = time.monotonic()
    try:
        report.meet(dist.group.WORLD)
    finally:
        assert time.monotonic() - start < 10


def rank_one_has_more_to_do(rank, report, group):
    report.meet(group)
    if rank == 1:
        sleep_in_native_code(GRACE + 3.0)
    return "done"


def rank_zero_alone_saves(rank, report, group):
    if rank == 0:
        report.come_together("all of them save.")
    report.position += 1
    report.meet(group)


def rank_one_is_late(rank, report, group):
    if rank == 1:
        time.sleep(2.5)
    report.come_together("all of them save.")
    return "saved"


def test_ranks_end_with_the_cause_whatever_their_main_threads_wait_for(tmp_path):
    cases = [
        rank_zero_is_killed,
        rank_zero_hangs,
        rank_one_hangs,
        rank_one_fails_while_rank_zero_waits_in_native_code,
        rank_one_fails_before_it_meets,
        rank_one_has_more_to_do,
        rank_zero_alone_saves,
        rank_one_is_late,
    ]
    said = two_ranks(tmp_path, {case.__name__: case for case in cases})
    ends = "Rank {} ends because another one failed and it cannot go on.\n"
    assert said["rank_zero_is_killed", 1].startswith(ends.format(1) + "Rank 0 was lost: it ended without an error of its own")
    assert "in sleep_in_native_code" in said["rank_zero_is_killed", 1]
    for hung, case in enumerate(("rank_zero_hangs", "rank_one_hangs")):
        assert f"PeerFailedError: Rank {hung} was lost" in said[case, 1 - hung]
        assert "busy for longer than the others wait" in said[case, 1 - hung]
        assert said[case, hung].startswith(ends.format(hung))
    case = "rank_one_fails_while_rank_zero_waits_in_native_code"
    assert said[case, 0].startswith(ends.format(0) + "Rank 1 failed: KeyError: 'boom'")
    assert said["rank_one_fails_before_it_meets", 0].startswith("PeerFailedError: Rank 1 failed: KeyError: 'boom'")
    assert [said["rank_one_has_more_to_do", rank] for rank in range(2)] == ["done", "done"]
    reason = "RuntimeError: Rank 0 waits for all ranks, but rank 1 has gone past this point: all of them save."
    assert said["rank_zero_alone_saves", 0] == reason
    assert said["rank_zero_alone_saves", 1].startswith(f"PeerFailedError: Rank 0 failed: {reason}")
    assert [said["rank_one_is_late", rank] for rank in range(2)] == ["saved", "saved"]
