"""Rules about the rollout engine: what the module refuses before it loads a model, and options that bound nothing."""

from pathlib import Path

from lightning_rlbatch.cli.findings import Findings, note, refused, without_effect
from lightning_rlbatch.cli.imports import is_import_path
from lightning_rlbatch.cli.run_config import RunConfig, load_pure

RECORDINGS = (".safetensors", ".jsonl", ".parquet")


def check_engine(run: RunConfig) -> Findings:
    """Find what keeps the configured engine from serving the run, and what it is told in vain."""
    problems, value = load_pure("rollout.engine_problems"), run.model.given.get("rollout_engine", "")
    if not isinstance(value, str | dict) or run.model.given.get("rollout_engine") == "":
        text = f"`rollout_engine` must name a class, such as TransformersEngineConfig, but is {value!r}. Drop it to take the default."
        yield refused("rollout_engine", text=text)
    engine, size = run.engine, run.model.number("rollout_tensor_parallel_size") or 1
    if size > 1 and run.world_size is not None and run.world_size % size:
        yield refused(
            "rollout_tensor_parallel_size",
            text=f"rollout_tensor_parallel_size={size} must divide the number of ranks, {run.world_size} (devices x num_nodes).",
        )
    overridden = run.model.name != "PPOModule"  # a subclass may bring an engine of its own
    if engine.name == "TransformersEngineConfig" and size > 1 and not overridden:
        problem = problems.spanning_problem(engine.name, size)
        yield refused(problem.option, text=problem.text)
    if engine.name == "ReplayEngineConfig":
        yield from _check_replay(run)
    if engine.name == "VLLMEngineConfig":
        yield from _check_vllm(run, size)
    if run.kind == "replay":
        for name in ("top_k", "top_p", "stop_token_ids", "rollout_engine", "validation_temperature"):
            if run.model.changed(name):
                yield without_effect(name, "recorded rollouts are replayed: nothing is generated.")
    elif run.data.get("val_prompts") is None:
        yield from _check_bounds(run)


def _check_replay(run: RunConfig) -> Findings:
    """Find what the replay engine, which has what was recorded and nothing else, cannot serve."""
    path = run.engine.get("path")
    if isinstance(path, str):
        place = Path(path)
        if not place.exists():
            yield refused("path", text=f"`path` of ReplayEngineConfig: there is neither a file nor a folder {path} in {Path.cwd()}.")
        elif place.is_dir() and not any(file.suffix in RECORDINGS for file in place.rglob("*")):
            yield refused("path", text=f"`path` of ReplayEngineConfig: {path} holds no {', '.join(RECORDINGS)} file of recorded rollouts.")
    if run.data.get("val_prompts") is not None and run.trainer.get("limit_val_batches") != 0:
        yield note(
            "val_prompts", text="A replay has no completions for validation, which are not recorded: it fails there. Drop val_prompts?"
        )
    if (run.model.number("max_sampling_rounds") or 1) > 1:
        yield note(
            "max_sampling_rounds", text="What was sampled again is not recorded: a replay with max_sampling_rounds above 1 may fail."
        )


def _check_vllm(run: RunConfig, size: int) -> Findings:
    problems, engine, model = load_pure("rollout.engine_problems"), run.engine, run.model
    names = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    values = {name: engine.get(name) for name in names}
    temperature, validation, top_k, top_p = (model.get(name) for name in ("temperature", "validation_temperature", "top_k", "top_p"))
    if not all(isinstance(value, int | float | None) for value in (*values.values(), temperature, validation, top_k, top_p)):
        return  # of the wrong type, as another rule says
    source = model.get("policy")
    by_name = isinstance(source, str) and (Path(source).exists() or not is_import_path(source))
    context = problems.EngineContext(
        policy=source if by_name else None,
        longest_sample=run.longest_sample,
        temperatures=(1.0 if temperature is None else temperature, temperature if validation is None else validation),
        top_k=top_k or 0,
        top_p=1.0 if top_p is None else top_p,
        tensor_parallel_size=size,
    )
    found = list(problems.vllm_range_problems(values))
    if "policy" in model.given:
        found += problems.vllm_problems(
            context, model=engine.get("model"), max_model_len=values["max_model_len"], installed=problems.vllm_is_installed()
        )
    for problem in found:
        yield refused(problem.option, text=problem.text)


def _check_bounds(run: RunConfig) -> Findings:
    prompts, group, limit = run.data.number("train_batch_size"), run.data.number("rollouts_per_prompt"), run.engine.number("max_batch_size")
    if limit is not None and prompts is not None and group is not None and run.world_size is not None:
        most = -(-prompts * group // run.world_size)
        if limit >= most:
            yield without_effect("max_batch_size", f"a rank generates at most {most} rollouts, fewer than {limit}.")
