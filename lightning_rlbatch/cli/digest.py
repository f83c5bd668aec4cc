"""The sentences and tables of ``rlbatch explain``, made of an explanation's values."""

from lightning_rlbatch.cli.explanation import Explanation
from lightning_rlbatch.cli.findings import Finding
from lightning_rlbatch.cli.numbers import binary_size
from lightning_rlbatch.cli.run_sizes import MicroBatch, RankShare, RunSizes


def summary(explanation: Explanation) -> str:
    """Return what one GPU runs at once, in a sentence.

    Args:
        explanation: Of a configuration.
    """
    micro, sp = explanation.at_once, explanation.run.sp_size
    shared = f" (1/{sp} of a micro-batch of its sequence-parallel group)" if sp > 1 else ""
    padded = ", padding to the longest sample included" if micro.padded else ""
    if micro.num_samples is not None:
        bound = (
            "with no bound on their tokens"
            if micro.max_tokens_per_gpu is None
            else f"of at most {micro.longest_sample} tokens each: {micro.max_tokens_per_gpu} tokens on one GPU{shared}"
        )
        return f"One GPU runs {micro.num_samples} sample{'s' * (micro.num_samples > 1)} at once{padded}, {bound}."
    if micro.max_tokens_per_gpu is None:
        return "How much one GPU runs at once is not configured."
    what = f"One GPU runs at most {explanation.tokens_per_gpu} tokens at once{shared}{padded}"
    if micro.longest_that_fit is None:
        return f"{what}, as whole samples."
    if (explanation.tokens_per_gpu or 0) * sp < (micro.longest_sample or 0):
        return f"{what}, fewer than a sample of the longest {micro.longest_sample} has."
    kind = f"sample{'s' * (micro.longest_that_fit > 1)} of the longest {micro.longest_sample}"
    return f"{what}: {micro.longest_that_fit} {kind} tokens per micro-batch, or more shorter ones."


def size_lines(explanation: Explanation) -> list[tuple[str, str]]:
    """Return (layer, sentence) from the whole iteration down to what one GPU holds; empty if the sizes cannot be derived.

    Args:
        explanation: Of a configuration.
    """
    sizes = explanation.sizes
    if sizes is None:
        return []
    whole, rank, micro = sizes.global_batch, sizes.rank, sizes.micro_batch
    lines, unit = [], "samples"
    if whole.rollouts is not None:
        unit = "rollouts"
        made = f"{whole.prompts} prompts x {whole.rollouts_per_prompt} responses = {whole.rollouts} rollouts"
        lines.append(("iteration", f"{made}; each GPU generates {rank.generated_per_gpu}"))
        step = f"{whole.units_per_mini_batch} prompts = {whole.rollouts_per_mini_batch} rollouts make one optimizer step"
        lines.append(("mini-batch", f"{step}; {whole.num_optimizer_steps} per iteration ({_steps(sizes)})"))
    else:
        lines.append(("mini-batch", f"{whole.units_per_mini_batch} {whole.unit} make one optimizer step"))
    unit = unit if str(rank.samples_per_step) != "1" else unit.removesuffix("s")
    mine = f"about {rank.samples_per_step} {unit} of each optimizer step; " if rank.samples_per_step is not None else ""
    groups = f" of {rank.sequence_parallel_size} GPUs each" if rank.sequence_parallel_size > 1 else ""
    ranks = f"{rank.data_parallel_size} data-parallel rank{'s' * (rank.data_parallel_size > 1)}{groups}"
    lines.append(("rank", f"{mine}{ranks}; parameters {_shards(rank)}"))
    count = micro.num_samples
    held = f"at most {micro.max_tokens} tokens" if count is None else f"{count} sample{'s' * (count > 1)}"
    lines.append(("micro-batch", f"{held}; each rank runs {_micro_steps(micro)} per optimizer step{_by_lengths(micro)}"))
    passes = [f"{name.removesuffix(', at most')}: {number}" for name, number in _other_passes(micro).items()]
    return lines + ([("other passes", "; ".join(passes))] if passes else [])


def layers(sizes: RunSizes) -> dict[str, dict[str, str]]:
    """Return every number with its name, by layer.

    Args:
        sizes: The numbers.
    """
    whole, rank, micro = sizes.global_batch, sizes.rank, sizes.micro_batch
    if whole.rollouts is None:
        batch = {f"{whole.unit} per mini-batch (optimizer step)": str(whole.units_per_mini_batch)}
    else:
        batch = {
            "prompts per iteration": str(whole.prompts),
            "rollouts per iteration": f"{whole.rollouts} = {whole.prompts} prompts x {whole.rollouts_per_prompt} responses",
            "mini-batches per pass": f"{whole.num_mini_batches} of {whole.units_per_mini_batch} prompts",
            "rollouts per mini-batch (optimizer step)": str(whole.rollouts_per_mini_batch),
            "optimizer steps per iteration": f"{whole.num_optimizer_steps} = {_steps(sizes)}",
        }
    return {"global batch": batch, "data-parallel rank": _rank_numbers(rank), "micro-batch": _micro_numbers(micro, rank)}


def _rank_numbers(rank: RankShare) -> dict[str, str]:
    groups = f"{rank.world_size} ranks / {rank.sequence_parallel_size} per sequence-parallel group"
    numbers = {
        "data-parallel ranks": f"{rank.data_parallel_size} = {groups}",
        "parameters": _shards(rank),
    }
    if rank.generated_per_gpu is not None:
        numbers["rollouts generated by each GPU"] = str(rank.generated_per_gpu)
        if (rank.gpus_per_engine or 1) > 1:
            numbers[f"rollouts of {rank.gpus_per_engine} GPUs that share an engine"] = str(rank.generated_per_engine)
        numbers["rollouts scored and trained per iteration"] = str(rank.rollouts)
    if rank.samples_per_step is not None:
        numbers["samples of one optimizer step"] = f"{rank.samples_per_step} by count (balancing by length moves it a little)"
    return numbers


def _micro_numbers(micro: MicroBatch, rank: RankShare) -> dict[str, str]:
    sp, numbers = rank.sequence_parallel_size, {}
    if micro.num_samples is not None:
        numbers["samples of a micro-batch"] = str(micro.num_samples)
    if micro.max_tokens is not None:
        product = f" = {micro.num_samples} x {micro.longest_sample}" if micro.num_samples is not None else ""
        product = f" = {micro.max_tokens_per_gpu} x {sp} GPUs" if not product and sp > 1 else product
        numbers["tokens of a micro-batch, at most"] = f"{micro.max_tokens}{product}"
        numbers["tokens on one GPU, at most"] = str(micro.max_tokens_per_gpu)
    if micro.longest_that_fit is not None:
        longest = f"{micro.longest_that_fit} of the longest ({micro.longest_sample} tokens)"
        numbers["samples of a micro-batch"] = f"as many as fit: {longest}, more of shorter ones"
    numbers["gradient accumulation (micro-steps)"] = f"{micro.num_micro_steps or 'as the lengths need'}{_by_lengths(micro)}"
    return numbers | _other_passes(micro)


def _other_passes(micro: MicroBatch) -> dict[str, str]:
    found = {
        "tokens of a log-prob micro-batch, at most": micro.log_prob_max_tokens,
        "samples of a log-prob micro-batch": micro.log_prob_num_samples,
        "tokens of a critic micro-batch, at most": micro.critic_max_tokens,
        "samples of a critic micro-batch": micro.critic_num_samples,
    }
    return {name: str(number) for name, number in found.items() if number is not None}


def _steps(sizes: RunSizes) -> str:
    whole = sizes.global_batch
    return f"{whole.num_mini_batches} mini-batches x {whole.ppo_epochs} PPO epoch{'s' * ((whole.ppo_epochs or 1) > 1)}"


def _shards(rank: RankShare) -> str:
    return f"sharded over {rank.parameter_shards} ranks" if rank.parameter_shards > 1 else "not sharded"


def _micro_steps(micro: MicroBatch) -> str:
    return "as many as the lengths need" if micro.num_micro_steps is None else f"{micro.num_micro_steps} of them"


def _by_lengths(micro: MicroBatch) -> str:
    steps = micro.num_micro_steps
    varies = micro.num_samples is None and steps is not None and steps.largest > 1
    return " (by the lengths)" if varies else ""


def memory_line(explanation: Explanation) -> str:
    """Return the estimate of memory as one line, or why there is none.

    Args:
        explanation: Of a configuration.
    """
    memory = explanation.memory
    if memory is None:
        return "not estimated: the policy has no files here. --build makes it without weights and counts it (takes seconds)"
    update = f"{binary_size(memory.update)} for the largest micro-batch" if memory.bounded else "activations, which nothing bounds"
    return f"about {binary_size(memory.total)} on one GPU = weights, gradients, states {binary_size(memory.states)} + {update}"


def options_in_effect(explanation: Explanation) -> str:
    """Return the options that the configuration sets and that act.

    Args:
        explanation: Of a configuration.
    """
    return ", ".join(f"{option.option}={option.value}" for option in explanation.options if option.given and option.state == "in effect")


def label(finding: Finding) -> str:
    """Return what a finding is about.

    Args:
        finding: Any.
    """
    return ", ".join(finding.options)
