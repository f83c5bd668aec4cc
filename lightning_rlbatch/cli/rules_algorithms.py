"""Rules about the settings of losses, estimators and corrections: the very objects are made, as the run makes them.

That takes torch, whose import takes longer than all the rest: it is loaded only for settings that could be refused at all.
"""

from typing import Any

from lightning_rlbatch.cli.annotations import misfit
from lightning_rlbatch.cli.findings import Findings, refused
from lightning_rlbatch.cli.run_config import RunConfig, load_pure
from lightning_rlbatch.cli.signatures import REQUIRED, ClassSource, part_source

_HOLDERS = ("policy_loss", "advantage", "kl_reward", "rollout_correction")
_MADE_ALWAYS = ("GDPO", "PassAtKTraining")  # what they need depends on more than their own settings
_BOUND_EACH_OTHER = ("dual_clip", "lower", "upper")  # settings of which no value is good by itself


def check_algorithms(run: RunConfig) -> Findings:
    """Find settings that an algorithm refuses, and what else an estimator needs of a run.

    Args:
        run: The configuration.
    """
    if "PPOModule" not in run.model.ancestors:
        return
    chosen = {name: found for name in _HOLDERS if (found := _ours(run.model.given.get(name))) is not None}
    if not any(may_be_refused(source.path.rpartition(".")[2], settings) for source, settings in chosen.values()):
        return
    made: dict[str, Any] = {}
    for name, (source, settings) in chosen.items():
        try:
            made[name] = _class(source)(**settings)
        except (ValueError, TypeError) as error:
            yield refused(name, *settings, text=str(error))
    import lightning_rlbatch.functional.trial as trial

    rewards = run.model.get("reward_functions")
    num_rewards = (len(rewards) if isinstance(rewards, list) else 1) + (run.model.get("reward_model") is not None)
    tried = {name: algorithm for name, algorithm in made.items() if name != "kl_reward"}
    for name, problem in trial.algorithm_errors(**tried, num_rewards=num_rewards):
        yield refused(name, *chosen[name][1], text=str(problem))
    if "advantage" in made:
        yield from _check_estimator(run, made["advantage"], num_rewards)


def may_be_refused(name: str, settings: dict[str, Any]) -> bool:
    """Say whether an algorithm has to be made to know that its settings are good: none refuses numbers above 0 and up to 1.

    Args:
        name: Of its class.
        settings: Of the right types.
    """
    others = {setting: value for setting, value in settings.items() if not isinstance(value, bool | str | None)}
    small = all(isinstance(value, int | float) and 0 < value <= 1 for value in others.values())
    return name in _MADE_ALWAYS or not small or not others.keys().isdisjoint(_BOUND_EACH_OTHER)


def _ours(value: Any) -> tuple[ClassSource, dict[str, Any]] | None:
    """Return a class of this package's algorithms with its settings; None for others, and if names or types are wrong."""
    path = value.get("class_path") if isinstance(value, dict) else value
    source = part_source(path) if isinstance(path, str) else None
    if source is None or not source.path.startswith("lightning_rlbatch.") or source.path.endswith(".FunctionLoss"):
        return None
    settings = (value.get("init_args") or {}) if isinstance(value, dict) else {}
    options = source.options or {}
    fits = isinstance(settings, dict) and all(
        name in options and misfit(options[name].annotation, options[name].module, setting) is None for name, setting in settings.items()
    )
    missing = [name for name, option in options.items() if option.default is REQUIRED and name not in settings]
    return (source, settings) if fits and not missing else None


def _class(source: ClassSource) -> Any:
    module, _, name = source.path.removeprefix("lightning_rlbatch.").rpartition(".")
    if module.startswith("functional"):
        import lightning_rlbatch.functional as functional

        return getattr(functional, name)
    return getattr(load_pure(module), name)


def _check_estimator(run: RunConfig, advantage: Any, num_rewards: int) -> Findings:
    name, model = type(advantage).__name__, run.model
    group = run.data.number("rollouts_per_prompt")
    if group is not None and run.kind == "rollouts" and group < advantage.min_group_size:
        yield refused(
            "rollouts_per_prompt",
            "advantage",
            text=f"The advantage {advantage} needs at least {advantage.min_group_size} rollouts of a prompt but rollouts_per_prompt is"
            f" {group}: every advantage would be 0. Raise rollouts_per_prompt, or choose another estimator.",
        )
    if advantage.needs_component_rewards and model.get("kl_reward") is not None:
        yield refused(
            "kl_reward",
            text=f"The advantage {name} normalizes each reward on its own and has no place for a KL penalty in the reward. Remove"
            " kl_reward, and put the penalty into the loss (kl_coefficient).",
        )
    if advantage.needs_component_rewards and model.get("overlong_buffer") is not None:
        yield refused(
            "overlong_buffer",
            text=f"The advantage {name} compares each reward on its own, so that the overlong penalty, which is added to their sum, would"
            " have no effect. Remove overlong_buffer, and pass a reward function of the length instead.",
        )
    given = model.get("reward_weights")
    weights = [*(given if isinstance(given, list) else []), *([model.get("reward_model_weight")] if model.get("reward_model") else [])]
    if getattr(advantage, "weights", 0) is None and any(weight != 1 for weight in weights):
        yield refused(
            "reward_weights",
            text=f"The advantage {name} adds the rewards by weights of its own, 1 each by default, so that reward_weights={given} would"
            f" have no effect on it. Set the advantage's weights, {num_rewards} of them.",
        )
