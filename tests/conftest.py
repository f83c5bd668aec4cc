"""Set up the process before torch is imported by any test module."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # forked ranks of a multi-threaded parent hang in OpenMP
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before any fixture is made: data modules without a seed take torch's, which otherwise is another in every process."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``cuda`` on machines without a GPU."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
