"""Start vLLM inside a process that trains."""

import os
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def inside_training() -> Iterator[None]:
    """Let vLLM start here as a launcher such as torchrun would have started it, and leave what trains as it was.

    * vLLM asks the environment for its rank, which not every launcher of Lightning tells; and it takes the GPU of number LOCAL_RANK,
      where ``Trainer(devices=[2, 3])`` has chosen others.
    * It seeds the random generators of the process.
    * It makes tensors without naming a device or dtype, which Lightning may have set to those of the policy.

    Source: vLLM's documentation of its external launcher, and of reproducibility.
    """
    with ExitStack() as stack:
        stack.enter_context(_environment(_launched()))
        stack.enter_context(_random_states())
        stack.enter_context(_plain_defaults())
        yield


def _launched() -> dict[str, str]:
    """Return what torchrun would have told this process."""
    is_joined = dist.is_available() and dist.is_initialized()
    facts = {"RANK": str(dist.get_rank() if is_joined else 0), "WORLD_SIZE": str(dist.get_world_size() if is_joined else 1)}
    facts["LOCAL_RANK"] = str(torch.cuda.current_device()) if torch.cuda.is_available() else os.environ.get("LOCAL_RANK", "0")
    if not is_joined:  # then vLLM joins itself, alone
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return facts


@contextmanager
def _environment(facts: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in facts}
    os.environ.update(facts)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _plain_defaults() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with ExitStack() as stack:
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
