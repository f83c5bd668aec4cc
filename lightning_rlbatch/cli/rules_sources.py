"""Rules about what a configuration names outside itself: files, models, functions."""

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_rlbatch
from lightning_rlbatch.cli.definitions import function_source
from lightning_rlbatch.cli.findings import Findings, note, refused
from lightning_rlbatch.cli.imports import NO_MODULE, changes_imports, import_problem, is_import_path, module_exists
from lightning_rlbatch.cli.pretrained_names import cached_folder, hub_cache, near_names
from lightning_rlbatch.cli.prompt_files import GIVEN, prompt_files, read_prompt_file
from lightning_rlbatch.cli.rules_short_names import HOLD_A_CLASS, check_short_names
from lightning_rlbatch.cli.run_config import RunConfig, load_pure

FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt")


def check_sources(run: RunConfig, *, offline: bool = False) -> Findings:
    """Find files that are not there, import paths that lead to no function, and pretrained models that are not on this machine.

    Args:
        run: The configuration.
        offline: True refuses what would have to be downloaded.
    """
    found = _check_all(run, offline)
    if any(changes_imports(path.rpartition(".")[0]) for path, _ in _class_paths(run)):  # then others may be found that are not yet
        found = (finding for finding in found if NO_MODULE not in finding.text)
    yield from found


def _check_all(run: RunConfig, offline: bool) -> Findings:
    for name in ("train_prompts", "val_prompts"):
        yield from _check_prompts(name, run.data.given.get(name))
    for name in ("train_dataset", "val_dataset"):
        yield from _check_dataset(name, run.data.given.get(name))
    replayed = run.data.given.get("dirpath")
    if run.kind == "replay" and isinstance(replayed, str) and not Path(replayed).exists():
        yield refused("dirpath", text=f"`dirpath`: there is no {replayed} in {Path.cwd()}. Record rollouts there first (RolloutRecorder).")
    for names, source in _pretrained(run):
        yield from _check_pretrained(names, source, offline)
    functions = run.model.given.get("reward_functions")
    for function in functions if isinstance(functions, list) else []:
        yield from _check_function("reward_functions", function)
    for name in ("environment", "answer_function", "optimizer", "lr_scheduler"):
        yield from _check_function(name, run.model.given.get(name))
    for path, option in _class_paths(run):
        problem = _own_class_problem(path) or import_problem(path)
        if problem is not None:
            yield refused(option, text=f"`{option}`: class_path {path}: {_ended(problem)}")
    yield from _check_top_level(run)
    yield from _check_columns(run)
    yield from _check_reward_names(run)
    yield from check_short_names(run)
    yield from _check_positions(run)


def _check_top_level(run: RunConfig) -> Findings:
    seed, checkpoint = run.others.get("seed_everything", True), run.others.get("ckpt_path")
    if not isinstance(seed, int | None) and not (isinstance(seed, str) and seed.isdigit()):
        yield refused("seed_everything", text=f"`seed_everything` must be an integer, or true for a random one, but is {seed!r}.")
    elsewhere = (
        not isinstance(checkpoint, str) or checkpoint.partition(":")[0] in ("last", "best", "hpc", "registry") or "://" in checkpoint
    )
    if not elsewhere and not Path(str(checkpoint)).exists():
        yield refused("ckpt_path", text=f"`ckpt_path`: there is no checkpoint {checkpoint} in {Path.cwd()}. Check the path, or use last.")


def _check_positions(run: RunConfig) -> Findings:
    """Compare the longest sample with the positions that the policy was made for, where its folder tells."""
    source, longest, response = run.model.given.get("policy"), run.longest_sample, run.data.number("max_response_length")
    file = Path(source) / "config.json" if isinstance(source, str) else None
    if file is None or not file.is_file() or longest is None or response is None or run.kind != "rollouts":
        return
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return  # transformers says what is wrong with it
    limit = {**config, **(config.get("text_config") or {})}.get("max_position_embeddings")
    if not isinstance(limit, int) or longest <= limit:
        return
    names = ("max_prompt_length", "max_response_length")
    text = (
        f"The policy has {limit} positions (max_position_embeddings) but a sample may have {longest} tokens (max_prompt_length="
        f"{longest - response} + max_response_length={response}): "
        + (f"a prompt of more than {limit - response} tokens" if response < limit else "every prompt")
        + " would be refused. Lower max_prompt_length or max_response_length."
    )
    yield refused(*names, text=text) if response >= limit else note(*names, text=text)


def _check_prompts(name: str, source: Any) -> Findings:
    if isinstance(source, str) and not Path(source).is_file() and is_import_path(source) and not source.endswith(FILES):
        problem = import_problem(source)
        if problem is not None:
            yield refused(name, text=f"`{name}`: {_ended(problem)}")
        return
    paths = [source] if isinstance(source, str) else source if isinstance(source, list) else []
    missing = [path for path in paths if isinstance(path, str) and not Path(path).is_file()]
    if missing:
        yield refused(
            name,
            text=f"`{name}`: there is no file {missing[0]} in {Path.cwd()}. Check the path; it is looked for from the folder in which you"
            " start the run. Or name a function that returns rows by its import path.",
        )
    for path in prompt_files(source):
        file = read_prompt_file(path)
        if file.problem is not None:
            yield refused(name, text=f"`{name}`: {file.problem}")
        elif file.places:
            yield note(name, text=f"`{name}`: only {file.places} were looked at.")


def _check_dataset(name: str, source: Any) -> Findings:
    if not isinstance(source, str) or Path(source).is_file():
        return
    problem = import_problem(source) if is_import_path(source) and not source.endswith(FILES) else None
    if problem is not None:
        yield refused(name, text=f"`{name}`: {_ended(problem)}")
    elif not is_import_path(source) or source.endswith(FILES):
        yield refused(
            name, text=f"`{name}`: there is no file {source} in {Path.cwd()}. Check the path, or name a function by its import path."
        )


def _check_columns(run: RunConfig) -> Findings:
    """Find arguments of reward functions that no column of the prompts has."""
    functions = run.model.given.get("reward_functions")
    for path in functions if isinstance(functions, list) else []:
        function = function_source(path) if isinstance(path, str) and is_import_path(path) else None
        for name in ("train_prompts", "val_prompts"):
            files = [read_prompt_file(file) for file in prompt_files(run.data.given.get(name))]
            if function is None or not files or any(file.num_rows is None for file in files):
                continue
            columns = frozenset().union(*(file.columns for file in files)) - {"prompt"}
            missing = [argument for argument in function.required if argument not in (*columns, *GIVEN)]
            if missing:
                what = f"Reward function {path.rpartition('.')[2]!r} takes {', '.join(missing)}"
                yield refused(
                    "reward_functions",
                    text=f"{what}, but the rows of `{name}` have no such column. It may take: {', '.join(sorted((*columns, *GIVEN)))}."
                    " Add the column to the rows, or give the argument a default.",
                )


def _check_reward_names(run: RunConfig) -> Findings:
    """Find reward functions whose metric would take the place of another."""
    functions = run.model.given.get("reward_functions")
    for path in functions if isinstance(functions, list) else []:
        problem = load_pure("modules.ppo_problems").reserved_name_problem(path.rpartition(".")[2]) if isinstance(path, str) else None
        if problem is not None:
            yield refused("reward_functions", text=problem)


def _pretrained(run: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each folder, hub name or import path of a model, once, with the options that hold it."""
    found: dict[str, list[str]] = {}
    for section, names in ((run.model, ("policy", "critic", "reward_model")), (run.data, ("tokenizer",))):
        for name in names:
            source = section.given.get(name)
            if isinstance(source, str) and source != "shared":
                found.setdefault(source, []).append(name)
    return ((tuple(names), source) for source, names in found.items())


def _check_pretrained(names: tuple[str, ...], source: str, offline: bool) -> Findings:
    if Path(source).is_dir():
        if "tokenizer" in names and load_pure("models.pretrained_files").is_model_without_tokenizer(Path(source)):
            yield refused("tokenizer", text=f"`tokenizer`: {load_pure('models.pretrained_files').without_tokenizer(source)}")
        return
    about, near = ", ".join(f"`{name}`" for name in names), near_names(source)
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    if is_import_path(source):
        problem = import_problem(source)
        if problem is not None:
            known = "" if module_exists(source) else ", and no folder of that name"
            yield refused(*names, text=f"{about}: {_ended(problem + known)}{meant}")
    elif source.count("/") > 1 or source.startswith(("/", ".", "~")):  # a hub name has one slash at most
        advice = meant or " Check the path, or make the model first."
        yield refused(*names, text=f"{about}: there is no folder {source} in {Path.cwd()}.{advice}")
    elif cached_folder(source) is None:
        text = f"{about}: {source} is neither a folder in {Path.cwd()} nor in the hub's cache, {hub_cache()}"
        if offline:
            yield refused(*names, text=f"{text}, and HF_HUB_OFFLINE is set.{meant or ' Check the spelling, or download it first.'}")
        else:
            yield note(*names, text=f"{text}: the run asks the hub for it.{meant}")


def _check_function(option: str, source: Any) -> Findings:
    is_other_form = not isinstance(source, str) or (option != "environment" and not is_import_path(source))  # judged by its type
    problem = None if is_other_form else import_problem(source)
    if problem is not None:
        yield refused(option, text=f"`{option}`: {_ended(problem)}")


def _ended(problem: str) -> str:
    return problem if problem.endswith("?") else f"{problem}."


def _class_paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the import path of every class that options hold, and the option."""
    for section in (run.model, run.data):
        if is_import_path(section.class_path):
            yield section.class_path, section.key
    for name in (*HOLD_A_CLASS, "rollout_engine"):
        value = run.model.given.get(name)
        if isinstance(value, str) and is_import_path(value):
            yield value, name
    for section in (run.model, run.data, run.strategy, run.trainer):
        for name, value in section.given.items():
            if name not in ("strategy", "reward_functions", "train_prompts", "val_prompts"):  # judged by rules of their own
                yield from ((path, name) for path in _paths_in(value))


def _own_class_problem(path: str) -> str | None:
    """Return why this package has no such class; None for those of other modules, which their text tells."""
    package, _, name = path.rpartition(".")
    if package != lightning_rlbatch.__name__ or name in lightning_rlbatch.__all__:
        return None
    near = difflib.get_close_matches(name, lightning_rlbatch.__all__, 1)
    return f"`{package}` has no `{name}`" + (f". Did you mean `{package}.{near[0]}`?" if near else "")


def _paths_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _paths_in({"class_path": item} if isinstance(item, str) and is_import_path(item) else item)
    elif isinstance(value, dict) and isinstance(value.get("class_path"), str) and is_import_path(value["class_path"]):
        yield value["class_path"]
        for item in (value.get("init_args") or {}).values():
            yield from _paths_in(item)
