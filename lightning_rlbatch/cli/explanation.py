"""Everything that ``rlbatch explain`` says, as data."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_rlbatch.cli.findings import Finding
from lightning_rlbatch.cli.memory import MemoryEstimate, estimate_memory, memory_json, tokens_per_gpu
from lightning_rlbatch.cli.model_facts import ModelFacts, model_facts
from lightning_rlbatch.cli.option_states import OptionState, option_states
from lightning_rlbatch.cli.rules_algorithms import check_algorithms
from lightning_rlbatch.cli.rules_batching import check_batching
from lightning_rlbatch.cli.rules_engine import check_engine
from lightning_rlbatch.cli.rules_names import check_names
from lightning_rlbatch.cli.rules_progress import check_progress
from lightning_rlbatch.cli.rules_ranges import check_ranges
from lightning_rlbatch.cli.rules_sources import check_sources
from lightning_rlbatch.cli.rules_trainer import check_trainer
from lightning_rlbatch.cli.rules_training import check_training
from lightning_rlbatch.cli.run_config import RunConfig
from lightning_rlbatch.cli.run_sizes import MicroBatch, RunSizes, micro_batch, run_sizes, sizes_json


@dataclass(frozen=True)
class Explanation:
    """The whole answer.

    Attributes:
        run: The configuration.
        world_size: Ranks that the numbers are for.
        sizes: Every number of the batches; None if they cannot be derived.
        at_once: What one GPU runs at once, known also where other sizes are not.
        tokens_per_gpu: Most tokens of a micro-batch on one GPU, a sample that is isolated included; None if they are not bounded.
        options: Fate of every option of cutting and spreading.
        findings: Everything worth saying; refused ones first.
        memory: Of one rank; None if nothing is known of the policy.
    """

    run: RunConfig
    world_size: int
    sizes: RunSizes | None
    at_once: MicroBatch
    tokens_per_gpu: int | None
    options: tuple[OptionState, ...]
    findings: tuple[Finding, ...]
    memory: MemoryEstimate | None

    @property
    def refused(self) -> bool:
        """Whether a run with this configuration would not start."""
        return any(finding.level == "refused" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON-ready data: numbers, not sentences."""
        return {
            "ok": not self.refused,
            "world_size": self.world_size,
            "data_parallel_size": self.world_size // self.run.sp_size,
            "sequence_parallel_size": self.run.sp_size,
            "tokens_per_gpu": self.tokens_per_gpu,
            "sizes": None if self.sizes is None else sizes_json(self.sizes),
            "options": [dataclasses.asdict(option) for option in self.options],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "memory": None if self.memory is None else memory_json(self.memory),
        }


def check(run: RunConfig, *, offline: bool = False) -> tuple[Finding, ...]:
    """Return all findings about a configuration, refused ones first.

    Args:
        run: The configuration.
        offline: True refuses pretrained models that would have to be downloaded.
    """
    sources = check_sources(run, offline=offline)
    rules = (
        check_names, check_ranges, check_batching, check_trainer, check_progress, check_training, check_algorithms, check_engine,
    )  # fmt: skip
    found = dict.fromkeys([*(finding for rule in rules for finding in rule(run)), *sources])  # each once
    order = {"refused": 0, "without effect": 1, "note": 2}
    return tuple(sorted(found, key=lambda finding: order[finding.level]))


def explain(run: RunConfig, facts: ModelFacts | None = None, *, offline: bool = False) -> Explanation:
    """Derive every number and judge every option.

    Args:
        run: The configuration; where only the machine knows the number of ranks, the numbers are for one sequence-parallel group.
        facts: Of the policy; None takes what its files say.
        offline: True refuses pretrained models that would have to be downloaded.
    """
    findings = check(run, offline=offline)
    if run.world_size is None:
        run = dataclasses.replace(run, world_size=run.sp_size)
    assert run.world_size is not None
    sizes = run_sizes(run)
    at_once = micro_batch(run, None) if sizes is None else sizes.micro_batch
    memory = estimate_memory(run, model_facts(run.model.get("policy")) if facts is None else facts)
    return Explanation(run, run.world_size, sizes, at_once, tokens_per_gpu(run), option_states(run, findings), findings, memory)
