"""Rules about the Trainer: what Lightning or our modules refuse of it, strategies, precision, callbacks."""

import difflib

from lightning_rlbatch.cli.findings import Findings, note, refused, without_effect
from lightning_rlbatch.cli.run_config import RunConfig, load_pure
from lightning_rlbatch.cli.signatures import class_source

_STRATEGIES = ("auto", "rlbatch_fsdp", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "ddp_find_unused_parameters_true")
_FOREIGN = ("fsdp", "deepspeed", "modelparallel", "model_parallel", "xla", "single_xla")
_PRECISIONS = {16: "16-mixed", "16": "16-mixed", "bf16": "bf16-mixed", 32: "32-true", "32": "32-true", 64: "64-true", "64": "64-true"}
_WITH_FSDP = ("32-true", "bf16-mixed", "bf16-true", "16-true")  # Lightning's list for strategies of FSDP2


def check_trainer(run: RunConfig) -> Findings:
    """Find what the Trainer is told in vain, or what it cannot do with these modules.

    Args:
        run: The configuration.
    """
    yield from _check_optimization(run)
    yield from _check_strategy(run)
    yield from _check_precision(run)
    yield from _check_callbacks(run)
    for name in ("limit_test_batches", "limit_predict_batches"):
        if run.trainer.get(name) is not None:
            yield without_effect(name, "fit neither tests nor predicts.")
    if run.trainer.get("use_distributed_sampler", True) is False and run.kind != "other":
        yield without_effect("use_distributed_sampler", "the data module shares samples out itself, and Lightning leaves its loader alone.")


def _check_optimization(run: RunConfig) -> Findings:
    clip, algorithm = run.trainer.get("gradient_clip_val"), run.trainer.given.get("gradient_clip_algorithm")
    if clip is not None or algorithm is not None:
        name = "gradient_clip_val" if clip is not None else "gradient_clip_algorithm"
        yield refused(name, text=f"trainer.{name} cannot be used: the module clips per role. Set model.init_args.max_grad_norm instead.")
    batches = run.trainer.get("accumulate_grad_batches", 1)
    if batches not in (1, None):
        yield refused(
            "accumulate_grad_batches",
            text=f"trainer.accumulate_grad_batches={batches} cannot be used: a Lightning batch is a whole optimizer step. Raise"
            " data.init_args.mini_batch_size instead; accumulation follows from the budget.",
        )


def _check_strategy(run: RunConfig) -> Findings:
    strategy = run.strategy.class_path or "auto"
    name = strategy.rpartition(".")[2].lower()
    if name.startswith(_FOREIGN) and not run.sharded:
        yield refused("strategy", text=f"trainer.strategy={strategy} does not run these modules. Use rlbatch_fsdp, ddp or auto.")
    elif "." not in strategy and strategy not in _STRATEGIES and not strategy.startswith("ddp") and not run.sharded:
        near = difflib.get_close_matches(strategy, _STRATEGIES, 1)
        meant = f"Did you mean {near[0]}?" if near else "Use rlbatch_fsdp, ddp or auto."
        yield refused("strategy", text=f"There is no strategy {strategy!r}. {meant}")
    if name.startswith("ddp"):
        for option in ("sequence_parallel_size", "data_parallel_replicate_size"):
            if option in run.strategy.given:
                yield refused(
                    option, text=f"`{option}` is an option of RLBatchFSDPStrategy, not of {strategy}. Use that strategy, or drop it."
                )
    if not run.sharded and run.world_size is not None and run.world_size > 1 and (strategy == "auto" or name.startswith("ddp")):
        yield note(
            "strategy",
            text=f"strategy={strategy} keeps a whole copy of the model on each of {run.world_size} ranks; rlbatch_fsdp shards it.",
        )
    devices = run.trainer.get("devices", "auto")
    if devices == 0 or devices == "0" or (isinstance(devices, int) and devices < -1) or devices == []:
        yield refused("devices", text=f"trainer.devices={devices!r} is no number of devices. Use 1 or more, or auto.")
    nodes = run.trainer.get("num_nodes", 1)
    if isinstance(nodes, int) and nodes < 1:
        yield refused("num_nodes", text=f"trainer.num_nodes={nodes} must be at least 1.")


def _check_precision(run: RunConfig) -> Findings:
    given = run.trainer.get("precision")
    precision = _PRECISIONS.get(given, given) if isinstance(given, int | str) else None
    on_cpu = run.trainer.get("accelerator", "auto") == "cpu"
    by_class = run.sharded and "." in run.strategy.class_path
    if by_class and precision is not None and precision not in _WITH_FSDP:
        plugins = {"16-mixed": "lightning_rlbatch.strategies.FSDPMixedPrecision", "64-true": "lightning.pytorch.plugins.DoublePrecision"}
        plugin = f" In its place pass the plugin {plugins[precision]}." if precision in plugins else ""
        yield refused(
            "precision",
            text=f"trainer.precision={given} cannot be used: Lightning allows {', '.join(_WITH_FSDP)} with a strategy of FSDP2.{plugin}",
        )
    elif precision == "16-mixed" and on_cpu:
        yield note(
            "precision",
            text=f"trainer.precision={given} is bf16-mixed on the CPU, which has no mixed precision with fp16. Set bf16-mixed or 32-true.",
        )


def _check_callbacks(run: RunConfig) -> Findings:
    told = load_pure("modules.callback_reasons")
    for path, given in run.callbacks:
        name, source = path.rpartition(".")[2], class_source(path)
        reasons = [
            told.CALLBACK_REASONS[base] for base in ({name} if source is None else source.ancestors) if base in told.CALLBACK_REASONS
        ]
        if reasons:
            yield refused("callbacks", text=told.misfit_callback(name, run.model.name, reasons[0]))
        elif run.sharded and name in ("WeightAveraging", "EMAWeightAveraging"):
            yield refused(
                "callbacks",
                text=f"{name} works on a whole copy of the module, but RLBatchFSDPStrategy keeps shards. Remove it, or train with"
                " strategy: ddp.",
            )
        elif name == "ModelCheckpoint" and given.get("train_time_interval") is not None:
            yield refused("train_time_interval", text=told.misfit_callback(name, run.model.name, told.NEVER_SAVES))
        elif name == "ModelCheckpoint" and given.get("save_last") == "link" and run.strategy.get("async_save") is True:
            yield refused(
                "save_last",
                text="With async_save a link to the last checkpoint may move only when that is complete, but"
                " ModelCheckpoint(save_last='link') moves it at once. Use RLBatchModelCheckpoint(save_last='link').",
            )
        elif name == "ParityCheck" and given.get("lengths") == []:
            yield refused("lengths", text="`lengths` of ParityCheck must hold at least one length.")
        elif name == "TrainingDoctor" and isinstance(given.get("ignore"), list):
            rules = load_pure("callbacks.doctor_rules").RULES
            unknown = [rule for rule in given["ignore"] if rule not in rules]
            if unknown:
                yield refused("ignore", text=f"`ignore` of TrainingDoctor: there is no rule {unknown[0]!r}. Rules: {', '.join(rules)}.")
        elif name == "RolloutLogger" and given.get("file_format", "jsonl") != "jsonl" and given.get("dirpath") is None:
            yield refused(
                "file_format", text=f"file_format={given['file_format']!r} has no effect without dirpath. Set dirpath, or drop it."
            )
