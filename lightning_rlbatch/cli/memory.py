"""Estimate what one rank holds in memory during an update."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_rlbatch.cli.memory_update import Numerics, Passes, block_passes, head_passes
from lightning_rlbatch.cli.model_facts import ModelFacts, ModelShape, model_facts
from lightning_rlbatch.cli.rules_training import class_name
from lightning_rlbatch.cli.run_config import RunConfig, load_pure

_WIDTHS = {1: "8 bit", 2: "16 bit", 4: "fp32", 8: "fp64"}
# Full-size states for each parameter; options that add one.
_STATES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "RMSprop": 1, "Adagrad": 1, "ASGD": 1,
           "Lion": 1, "Muon": 1, "SGD": 0, "Adafactor": 0}  # fmt: skip
_ONE_MORE = ("amsgrad", "momentum", "centered")


@dataclass(frozen=True)
class MemoryPart:
    """Something that a rank holds.

    Attributes:
        role: ``policy``, ``critic``, ``reference``, ``reward model`` or ``rollout engine``.
        what: Such as ``gradients``.
        size: Bytes.
        detail: Width of its numbers, or how it is made up.
        in_host_memory: Whether it lies beside the GPU.
        in_update: Whether it belongs to the passes of an update rather than to the states of the run.
    """

    role: str
    what: str
    size: int
    detail: str = ""
    in_host_memory: bool = False
    in_update: bool = False


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of an update, by what they are for.

    Attributes:
        num_parameters: Of the policy.
        counted: See :class:`ModelFacts`.
        parts: What is there at once.
        bounded: Whether the configuration bounds the tokens of a micro-batch; if not, activations are not in it.
        notes: What would change a part, and what is not known.
    """

    num_parameters: int
    counted: str
    parts: tuple[MemoryPart, ...]
    bounded: bool
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> int:
        """Bytes on the device that are there between updates or whenever there are gradients."""
        return sum(part.size for part in self.parts if not part.in_host_memory and not part.in_update)

    @property
    def update(self) -> int:
        """Bytes of the largest micro-batch's forward and backward pass."""
        return sum(part.size for part in self.parts if part.in_update)

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.states + self.update


def estimate_memory(run: RunConfig, facts: ModelFacts | None) -> MemoryEstimate | None:
    """Estimate the memory of one rank; None if nothing is known of the policy.

    Counted is the moment of an update at which the most is there, with gradients of an earlier micro-batch. The key/value cache of
    rollouts, temporaries of the optimizer, buffers of collectives and the allocator's reserve are not in it.

    Args:
        run: The configuration.
        facts: Of the policy.

    Source:
        Bytes of states: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 3.
    """
    if facts is None:
        return None
    numerics = Numerics.of(run)
    own_critic = run.model.get("critic") not in (None, "shared")
    critic = _critic_facts(run, facts) if own_critic else None
    parts, notes = _states(run, numerics, {"policy": facts} | ({} if critic is None else {"critic": critic}))
    parts += _frozen(run, numerics, facts)
    update = _update(run, numerics, facts, critic)
    return MemoryEstimate(facts.num_parameters, facts.counted, (*parts, *(update or ())), update is not None, (*notes, *_engine_notes(run)))


def _critic_facts(run: RunConfig, policy: ModelFacts) -> ModelFacts:
    """Return the critic's trunk, which has no LM head; taken to be as large as the policy's if its files are not here."""
    facts = model_facts(run.model.get("critic")) or policy
    shape = ModelShape.of(facts.config)
    head = 0 if shape is None or shape.tied else shape.table
    return dataclasses.replace(facts, num_parameters=facts.num_parameters - head, num_trained=max(0, facts.num_trained - head))


def _states(run: RunConfig, numerics: Numerics, trained: dict[str, ModelFacts]) -> tuple[list[MemoryPart], list[str]]:
    shards = (run.world_size or 1) // run.replicate_size if run.sharded else 1
    optimizer, states, state_size, notes = _optimizer(run, numerics.states)
    host = run.strategy.get("cpu_offload") is True
    # Reducing once per optimizer step keeps whole gradients until the last micro-batch.
    reduces_once = load_pure("functional.gradient_sync").reduces_once
    gathers = (
        run.sharded and shards > 1 and reduces_once(run.strategy.get("grad_sync"), sum(facts.num_trained for facts in trained.values()))
    )
    if gathers:
        notes.append(
            "grad_sync: last (auto takes it for small models) keeps whole gradients until the last micro-batch; every keeps shards"
        )
    width = _WIDTHS[numerics.states]
    parts = []
    for role, facts in trained.items():
        own = _share(facts.num_trained, shards)
        gradients = facts.num_trained if gathers else own
        parts.append(MemoryPart(role, "parameters", _share(facts.num_parameters, shards) * numerics.states, width, host))
        parts.append(MemoryPart(role, "gradients", gradients * numerics.states, width, host and not gathers))
        if states:
            detail = f"{_WIDTHS[state_size]} x {states}"
            parts.append(MemoryPart(role, f"{optimizer} states", own * state_size * states, detail, host))
    return parts, notes


def _frozen(run: RunConfig, numerics: Numerics, policy: ModelFacts) -> list[MemoryPart]:
    """Return the models that do not train: reference, reward model, and the engine's copy."""
    shards = (run.world_size or 1) // run.replicate_size if run.sharded else 1
    width, parts = _WIDTHS[numerics.states], []
    if (run.model.get("kl_coefficient") or run.model.get("kl_reward") is not None) and policy.num_trained == policy.num_parameters:
        away = run.strategy.get("reference_cpu_offload") is True
        parts.append(MemoryPart("reference", "parameters", _share(policy.num_parameters, shards) * numerics.states, width, away))
    judge = model_facts(run.model.get("reward_model"))
    if judge is not None:
        parts.append(MemoryPart("reward model", "parameters", _share(judge.num_parameters, shards) * numerics.states, width))
    if run.kind == "rollouts":
        parts.append(_engine_part(run, policy, numerics.states))
    return parts


def _engine_part(run: RunConfig, facts: ModelFacts, size: int) -> MemoryPart:
    """Return the engine's weights; vLLM's ``auto`` is 16 bit, and its ranks share a copy."""
    vllm = run.engine.name == "VLLMEngineConfig"
    own = {"bfloat16": 2, "float16": 2, "float32": 4}.get(str(run.engine.get("dtype")), 2 if vllm else size)
    ranks = run.model.number("rollout_tensor_parallel_size") or 1
    copy = f"its share of a copy on {ranks} ranks" if vllm and ranks > 1 else "its own whole copy"
    return MemoryPart("rollout engine", copy, _share(facts.num_parameters * own, ranks if vllm else 1), _WIDTHS[own])


def _engine_notes(run: RunConfig) -> tuple[str, ...]:
    share = run.engine.get("gpu_memory_utilization")
    if run.kind != "rollouts" or not isinstance(share, int | float):
        return ()
    return (f"gpu_memory_utilization: while it samples vLLM takes up to {100 * share:.0f}% of the GPU, key/value cache included",)


def _share(number: int, shards: int) -> int:
    return -(-number // max(1, shards))


def _optimizer(run: RunConfig, size: int) -> tuple[str, int, int, list[str]]:
    """Return its name, full-size states of a parameter, bytes of one, and what is not known of it."""
    source = run.model.get("optimizer")
    name = class_name(source) or "AdamW"
    options = (source.get("init_args") or {}) if isinstance(source, dict) else {}
    base = name.partition("8bit")[0]
    more = sum(bool(options.get(option)) for option in _ONE_MORE) if base != "Muon" else 0
    notes = [] if base in _STATES else [f"optimizer: states of {name} are not known here; counted like those of AdamW"]
    return name, _STATES.get(base, 2) + more, 1 if base != name else size, notes


def _update(run: RunConfig, numerics: Numerics, facts: ModelFacts, critic: ModelFacts | None) -> list[MemoryPart] | None:
    """Return what the passes of the largest micro-batch hold; None if its tokens are not bounded or the model's sizes not known."""
    shape, tokens = ModelShape.of(facts.config), tokens_per_gpu(run)
    if shape is None or tokens is None:
        return None
    recomputed = run.strategy.get("activation_checkpointing") is True
    full_kl = bool(run.model.get("kl_coefficient")) and str(run.model.get("kl_kind")).startswith("full")
    kept, head, more = head_passes(run, shape, numerics, tokens, weight_trained=facts.num_trained == facts.num_parameters, full_kl=full_kl)
    policy = dataclasses.replace(block_passes(shape, numerics, tokens, recomputed), head_kept=kept, head=head, more=more)
    parts = _parts_of("policy", policy, tokens)
    critic_shape = None if critic is None else ModelShape.of(critic.config)
    if critic_shape is not None:
        own = tokens_per_gpu(run, "critic_")
        apart = run.data.get("critic_max_tokens_per_rank") is not None or run.data.get("critic_micro_batch_size") is not None
        values = block_passes(critic_shape, numerics, own if apart and own is not None else tokens, recomputed)
        parts = _larger(policy, values, parts, tokens, apart=apart)
    return parts + _gathered(run, numerics, facts, shape)


def _larger(policy: Passes, critic: Passes, parts: list[MemoryPart], tokens: int, *, apart: bool) -> list[MemoryPart]:
    """Return the parts of the larger moment: the policy's backward pass, or the critic's, which comes first where both are one loss."""
    if apart:
        return parts if policy.peak >= critic.peak else _parts_of("critic", critic, tokens)
    waiting = policy.blocks + policy.head_kept + sum(policy.more.values())
    if policy.peak >= waiting + critic.peak:
        return parts
    waits = dataclasses.replace(policy, recomputed=0, head=policy.head_kept)
    return _parts_of("policy", waits, tokens) + _parts_of("critic", critic, tokens)


def _parts_of(role: str, passes: Passes, tokens: int) -> list[MemoryPart]:
    sizes = {
        f"activations of {tokens:,} tokens": passes.blocks,
        "one block's, run again": passes.recomputed if passes.recomputed > passes.head else 0,
        "LM head: logits, tiles, gradients": passes.head if passes.head >= passes.recomputed else 0,
        **passes.more,
    }
    return [MemoryPart(role, what, size, in_update=True) for what, size in sizes.items() if size]


def _gathered(run: RunConfig, numerics: Numerics, facts: ModelFacts, shape: ModelShape) -> list[MemoryPart]:
    """Return whole parameters: FSDP keeps those outside of the blocks, and gathers a block before the one that runs is freed."""
    if numerics.cast:
        return [
            MemoryPart("policy", "copy of the parameters in 16 bit (autocast)", facts.num_parameters * numerics.compute, in_update=True)
        ]
    if not run.sharded or (run.world_size or 1) // run.replicate_size < 2:
        return []
    root = shape.table * (1 if shape.tied else 2)
    block = max(0, facts.num_parameters - root) // shape.layers
    return [
        MemoryPart("policy", "parameters gathered: embeddings, head, two blocks", (root + 2 * block) * numerics.compute, in_update=True)
    ]


def tokens_per_gpu(run: RunConfig, role: str = "") -> int | None:
    """Return the most tokens that one GPU holds in a micro-batch of the update, None if the configuration does not bound them.

    Args:
        run: The configuration.
        role: ``critic_`` for the critic's own limits.
    """
    budget, samples, longest = (
        run.data.number(f"{role}max_tokens_per_rank"),
        run.data.number(f"{role}micro_batch_size"),
        run.longest_sample,
    )
    if budget is not None:
        isolated = -(-longest // run.sp_size) if longest is not None and run.data.get("oversize") == "isolate" else 0
        return max(budget, isolated)
    return None if samples is None or longest is None else -(-samples * longest // run.sp_size)


def describe(part: MemoryPart) -> str:
    """Return a part in words.

    Args:
        part: Any.
    """
    detail = f" ({part.detail})" if part.detail else ""
    return f"{part.role}: {part.what}{detail}{', in host memory' if part.in_host_memory else ''}"


def memory_json(memory: MemoryEstimate) -> dict[str, Any]:
    """Return an estimate as JSON-ready data, in bytes.

    Args:
        memory: The estimate.
    """
    return dataclasses.asdict(memory) | {"states": memory.states, "update": memory.update, "total": memory.total}
