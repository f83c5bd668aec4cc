"""Rules about sizes: ranks, mini-batches, budgets, and how they divide."""

from lightning_rlbatch.cli.findings import Findings, note, refused, without_effect
from lightning_rlbatch.cli.run_config import RunConfig

BUDGETS = ("max_tokens_per_rank", "log_prob_max_tokens_per_rank", "critic_max_tokens_per_rank")
_COUNTS = ("micro_batch_size", "log_prob_micro_batch_size", "critic_micro_batch_size")


def check_batching(run: RunConfig) -> Findings:
    """Find options of cutting and spreading that are refused, without effect, or surprising."""
    yield from _check_one_budget(run)
    yield from _check_ranks(run)
    yield from _check_budget_holds_a_sample(run)
    yield from _check_balancing(run)
    yield from _check_divisibility(run)


def _check_one_budget(run: RunConfig) -> Findings:
    data = run.data
    if not data.has("max_tokens_per_rank"):
        return
    tokens, samples = data.get("max_tokens_per_rank"), data.get("micro_batch_size")
    advice = (
        "Keep max_tokens_per_rank for micro-batches of bounded tokens (recommended), or micro_batch_size for a fixed number of samples."
    )
    if tokens is not None and samples is not None:
        yield refused(
            "max_tokens_per_rank",
            "micro_batch_size",
            text=f"Exactly one of max_tokens_per_rank={tokens} and micro_batch_size={samples} may be set. {advice}",
        )
    elif tokens is None and samples is None:
        yield refused("max_tokens_per_rank", "micro_batch_size", text=f"Set max_tokens_per_rank or micro_batch_size. {advice}")
    for decides, refused_names, wanted in ((BUDGETS[0], _COUNTS[1:], BUDGETS[1:]), (_COUNTS[0], BUDGETS[1:], _COUNTS[1:])):
        for name, instead in zip(refused_names, wanted):
            if data.get(decides) is not None and data.get(name) is not None:
                yield refused(name, text=f"`{name}`={data.get(name)} does not go with {decides}: set {instead} instead, or drop it.")
    trunk = run.model.get("critic") not in (None, "shared")
    for name in (BUDGETS[2], _COUNTS[2]):
        if data.get(name) is not None and "PPOModule" in run.model.ancestors and not trunk:
            yield refused(name, text=f"`{name}` needs a critic with a trunk of its own, but critic is {run.model.get('critic')}. Drop it.")


def _check_ranks(run: RunConfig) -> Findings:
    sp, world = run.sp_size, run.world_size
    if sp > 1 and run.model.get("remove_padding") is False:
        yield refused(
            "sequence_parallel_size",
            "remove_padding",
            text=f"sequence_parallel_size={sp} shards packed tokens, but remove_padding is false. Set it to true, or"
            " sequence_parallel_size to 1.",
        )
    if world is None:
        yield note("devices", text="The number of ranks depends on the machine: pass --world-size to see the numbers of a given one.")
    elif world % sp:
        ranks = " or ".join(str(number) for number in (world // sp * sp, (world // sp + 1) * sp) if number)
        yield refused(
            "sequence_parallel_size",
            text=f"sequence_parallel_size={sp} must divide the number of ranks, {world} (devices x num_nodes). Use a divisor of {world},"
            f" or {ranks} ranks.",
        )
    elif (world // sp) % run.replicate_size:
        yield refused(
            "data_parallel_replicate_size",
            text=f"data_parallel_replicate_size={run.replicate_size} must divide the number of data-parallel ranks, {world // sp}"
            f" ({world} ranks / sequence_parallel_size={sp}).",
        )


def _check_budget_holds_a_sample(run: RunConfig) -> Findings:
    longest = run.longest_sample
    scored = BUDGETS[1] if run.data.number(BUDGETS[1]) is not None else BUDGETS[0]
    for name in BUDGETS:
        budget = run.data.number(name)
        # A reward model reads one token behind the response.
        one_more = name == scored and run.model.get("reward_model") is not None
        if budget is None or longest is None or run.data.get("oversize") != "error" or budget * run.sp_size >= longest + one_more:
            continue
        yield refused(
            name,
            text=f"A sample may have {longest + one_more} tokens (max_prompt_length={run.data.get('max_prompt_length')} +"
            f" max_response_length={run.data.get('max_response_length')}{' + 1 for the reward model' * one_more}) but a micro-batch holds"
            f" {budget * run.sp_size} ({name}={budget} x sequence_parallel_size={run.sp_size}). Raise {name} to"
            f" {-(-(longest + one_more) // run.sp_size)}, raise sequence_parallel_size, lower the lengths, or set oversize to isolate.",
        )
    budgets = [run.data.number(name) for name in BUDGETS if run.data.get(name) is not None]
    if run.data.changed("oversize"):
        if not budgets:
            yield without_effect("oversize", "micro_batch_size counts samples: there is no token budget that a sample could exceed.")
        elif longest is not None and all(budget is not None and budget * run.sp_size >= longest for budget in budgets):
            yield without_effect("oversize", f"no sample is longer than {longest} tokens, and every budget holds that many.")


def _check_balancing(run: RunConfig) -> Findings:
    data = run.data
    if data.changed("equal_size") and data.get("balance") is False:
        yield without_effect(
            "equal_size", "with balance: false every rank gets a contiguous block, and these differ by one sample at most."
        )
    elif data.changed("equal_size") and data.get("planner") == "per_rank":
        yield without_effect("equal_size", "planner=per_rank always gives every rank the same number of samples, plus or minus one.")
    if data.changed("workload_coefficient") and data.get("balance") is False and data.get("planner") == "global":
        if run.kind == "samples":
            yield without_effect("workload_coefficient", "with balance: false samples are not weighed; only logged plan numbers use it.")
        else:
            yield note("workload_coefficient", text="With balance: false the coefficient has a part in forward-only passes alone.")
    dp = None if run.world_size is None or run.world_size % run.sp_size else run.world_size // run.sp_size
    micro = data.number("micro_batch_size")
    if dp == 1 and micro is None and (data.changed("balance") or data.changed("planner")):
        name = "balance" if data.changed("balance") else "planner"
        yield note(name, text=f"There is one data-parallel rank: `{name}` only decides how its samples are cut into micro-batches.")
    if dp == 1 and data.changed("equal_size") and data.get("balance") is not False:
        yield without_effect("equal_size", "there is one data-parallel rank, which gets all samples.")


def _check_divisibility(run: RunConfig) -> Findings:
    data = run.data
    prompts, mini = data.number("train_batch_size"), data.number("mini_batch_size")
    group = data.number("rollouts_per_prompt") or 1
    if prompts is not None and mini is not None:
        if mini > prompts:
            yield refused(
                "mini_batch_size",
                text=f"mini_batch_size={mini} prompts per optimizer step exceed train_batch_size={prompts} prompts per iteration. Lower"
                " the first or raise the second.",
            )
        elif prompts % mini:
            full, rest = divmod(prompts, mini)
            yield note(
                "mini_batch_size",
                text=f"train_batch_size={prompts} is no multiple of mini_batch_size={mini}: {full} mini-batch(es) of {mini} prompts"
                f" and a last one of {rest}, each divided by its own counts. For equal ones use mini_batch_size="
                f"{_nearest_divisor(prompts, mini)}.",
            )
    world = run.world_size
    if mini is None or world is None or world % run.sp_size:
        return
    samples = mini * group if run.kind == "rollouts" else mini
    yield from _check_shares(run, samples, world // run.sp_size)
    if run.kind == "rollouts" and prompts is not None and prompts * group % world:
        least = prompts * group // world
        yield note(
            "train_batch_size",
            text=f"{prompts * group} rollouts on {world} ranks: while generating a rank has {least} or {least + 1} of them. To give all the"
            f" same, make train_batch_size x rollouts_per_prompt a multiple of {world}.",
        )


def _check_shares(run: RunConfig, samples: int, dp_size: int) -> Findings:
    if run.kind == "replay":
        return
    what = "rollouts" if run.kind == "rollouts" else "samples"
    if samples < dp_size:
        enough = -(-dp_size * (run.data.number("mini_batch_size") or 1) // samples)
        yield note(
            "mini_batch_size",
            text=f"A mini-batch has {samples} {what} for {dp_size} data-parallel ranks: {dp_size - samples} of them run fillers of"
            f" zero weight and do no useful work. Raise mini_batch_size to {enough}.",
        )
    elif samples % dp_size:
        yield note(
            "mini_batch_size",
            text=f"{samples} {what} of a mini-batch on {dp_size} data-parallel ranks: about {samples / dp_size:.1f} each. Nothing is"
            f" dropped; a multiple of {dp_size} would divide evenly.",
        )
    share = -(-samples // dp_size)
    micro = run.data.number("micro_batch_size")
    if micro is not None and micro > share:
        yield note(
            "micro_batch_size",
            text=f"A rank has at most {share} {what} of a mini-batch, so micro_batch_size={micro} never cuts: any value from {share} on"
            " does the same.",
        )
    budget, longest = run.data.number("max_tokens_per_rank"), run.longest_sample
    if budget is not None and longest is not None and budget * run.sp_size >= samples * longest and samples > 1:
        yield note(
            "max_tokens_per_rank",
            text=f"A whole mini-batch has at most {samples * longest} tokens, and one micro-batch may hold {budget * run.sp_size}: the"
            " budget never cuts, every step is one micro-step.",
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda divisor: abs(divisor - wanted))
