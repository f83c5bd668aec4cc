"""Rules about the settings of losses, estimators and corrections: the very objects are made, as the run makes them.

That takes torch, whose import takes longer than all the rest: it is loaded only for settings that could be refused at all.
"""

from typing import Any

from lightning_rlbatch.cli.annotations import misfit
from lightning_rlbatch.cli.findings import Findings, refused
from lightning_rlbatch.cli.run_config import RunConfig, load_pure
from lightning_rlbatch.cli.signatures import REQUIRED, ClassSource, part_source

_HOLDERS = ("policy_loss", "advantage", "kl_reward", "rollout_correction")
_MADE_ALWAYS = ("PassAtKTraining",)  # what it needs depends on more than its own settings
_BOUND_EACH_OTHER = ("dual_clip", "lower", "upper")  # settings of which no value is good by itself


def check_algorithms(run: RunConfig) -> Findings:
    """Find settings that an algorithm refuses, and groups that are too small for an estimator.

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
    group, advantage = run.data.number("rollouts_per_prompt"), made.get("advantage")
    if advantage is not None and group is not None and run.kind == "rollouts":
        problem = load_pure("modules.ppo_problems").group_size_problem(advantage, advantage.min_group_size, group)
        if problem is not None:
            yield refused("rollouts_per_prompt", "advantage", text=problem)


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
