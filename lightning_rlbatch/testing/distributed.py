"""Run a function on several forked gloo ranks under a watchdog."""

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

LINGER_SECONDS = 1.0  # a rank that has succeeded stays so long at most, since its peers may still be using its connections
GRACE_SECONDS = 25.0  # after one rank failed the others get this long to fail by themselves (collectives time out after 20 s)
_PORTS = range(16_384, 32_768)  # below those that systems hand out by themselves: gloo's connections would take one before its user


def free_port() -> int:
    """Return a TCP port that was free a moment ago, and that nobody is likely to take in the next one."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _rank_main(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    store: str | None,
    port: int,
    pg_timeout: float,
    out: Connection,
    inherited: list[Connection],
) -> None:
    for pipe in inherited:  # the parent's ends: a copy of them held here would hide that the parent has closed its own
        pipe.close()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)  # a forked child of a multi-threaded parent hangs in OpenMP
    gc.freeze()  # a collection would visit, and so copy, every object that the parent's imports made
    try:
        if store is not None:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=pg_timeout)
            )
        succeeded, payload = True, pickle.dumps((True, fn(rank, world_size, *args)))
    except BaseException:
        succeeded, payload = False, pickle.dumps((False, traceback.format_exc()))
    out.send_bytes(payload)
    if succeeded:
        out.poll(LINGER_SECONDS)  # until the parent closes its end, having heard of every rank
    out.close()
    os._exit(0)  # skip the parent's exit handlers, and a process-group teardown that could wait for a dead peer


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 90.0, pg_timeout: float = 20.0, init_process_group: bool = True
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` forked processes joined by gloo.

    Forking after torch is imported starts two ranks in well under a second. Set ``OMP_NUM_THREADS=1`` before torch is
    imported: a child forked from a process that already runs OpenMP threads hangs.

    Args:
        fn: Any callable, closures included; its result must be picklable.
        world_size: Number of ranks.
        *args: Passed on to ``fn`` after rank and world size.
        timeout: Seconds after which every rank is killed and the call fails.
        pg_timeout: Seconds after which a collective that waits for a peer fails.
        init_process_group: False leaves joining the process group to ``fn`` (a Lightning ``Trainer`` does it itself).

    Returns:
        The results in rank order.

    Raises:
        AssertionError: A rank raised, died or was still running at the timeout. The message holds every rank's traceback.
    """
    context = multiprocessing.get_context("fork")
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store") if init_process_group else None
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe()
            pipes.append(receiver)
            process: BaseProcess = context.Process(
                target=_rank_main, args=(fn, rank, world_size, args, store, port, pg_timeout, sender, pipes)
            )
            process.start()
            sender.close()
            processes.append(process)
        try:
            results, failures = _collect(pipes, timeout)
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                if process.is_alive():
                    process.join(timeout=2.0)
                if process.is_alive():
                    process.kill()
                process.join()
    if failures:
        report = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items()))
        raise AssertionError(f"{len(failures)} of {world_size} ranks failed.\n{report}")
    return [results[rank] for rank in range(world_size)]


def _collect(pipes: list[Connection], timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
    deadline = time.monotonic() + timeout
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait([pipe for pipe in pipes if id(pipe) in open_pipes], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.update({rank: f"still running after {timeout:.0f} s, killed" for rank in open_pipes.values()})
            return results, failures
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(id(pipe))
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                succeeded, value = False, "died without a result (killed, or crashed in native code)"
            if succeeded:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return results, failures
