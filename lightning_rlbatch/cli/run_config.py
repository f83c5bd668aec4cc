"""What a configuration means for batches: its classes, their options with defaults, and the ranks of the run."""

import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning_rlbatch
from lightning_rlbatch.cli.signatures import REQUIRED, UNKNOWN, Option, class_source

DATA_KINDS = {"RolloutDataModule": "rollouts", "ReplayDataModule": "replay", "SFTDataModule": "samples"}


@dataclass(frozen=True)
class Section:
    """One configured class: what the file says, over the defaults of the class.

    Attributes:
        key: Where it stands, for example ``data``.
        class_path: As written; empty if the section is missing.
        given: Options that the file or the command line sets.
        options: All options of the class; None if its source was not found.
        ancestors: Names of the class and its bases.
    """

    key: str
    class_path: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Option] | None = None
    ancestors: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Class name without its module."""
        return self.class_path.rpartition(".")[2]

    def has(self, option: str) -> bool:
        """Say whether the class takes an option."""
        return self.options is not None and option in self.options

    def get(self, option: str, default: Any = None) -> Any:
        """Return an option's value: given, else the class's default if that is a literal, else ``default``."""
        if option in self.given:
            return self.given[option]
        known = (self.options or {}).get(option)
        return default if known is None or known.default is REQUIRED or known.default is UNKNOWN else known.default

    def changed(self, option: str) -> bool:
        """Say whether the user set an option to something else than its default."""
        if option not in self.given:
            return False
        known = (self.options or {}).get(option)
        return known is None or known.default is REQUIRED or self.given[option] != known.default

    def number(self, option: str) -> int | None:
        """Return a whole number of at least 1, or None for everything else (which other rules report)."""
        value = self.get(option)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


@dataclass(frozen=True)
class RunConfig:
    """A run as configured.

    Attributes:
        model: The LightningModule.
        data: The DataModule.
        strategy: The Trainer's strategy; ``class_path`` also holds a name such as ``rlbatch_fsdp``.
        trainer: Trainer options that are set.
        others: Keys that are in none of the sections, with their values; those within a section by their path, ``data.seed``.
        world_size: Number of ranks; None if only the machine knows (``devices: auto``).
    """

    model: Section
    data: Section
    strategy: Section
    trainer: Section
    others: dict[str, Any]
    world_size: int | None

    @property
    def kind(self) -> str:
        """``rollouts``, ``replay``, ``samples``, or ``other`` for a data module that is none of ours."""
        return next((kind for name, kind in DATA_KINDS.items() if name in self.data.ancestors), "other")

    @property
    def engine(self) -> Section:
        """The rollout engine; the default one where none is named, an empty section for modules that have none."""
        key, value = "model.rollout_engine", self.model.given.get("rollout_engine")
        if "PPOModule" not in self.model.ancestors:
            return Section(key)
        made = {"class_path": value} if isinstance(value, str) else value if isinstance(value, dict) else {}
        if "class_path" not in made:  # options alone belong to the default one
            made = {"class_path": "TransformersEngineConfig", "init_args": made.get("init_args", made)}
        path = str(made["class_path"])
        return _section(key, {**made, "class_path": path if "." in path else f"lightning_rlbatch.rollout.{path}"})

    @property
    def callbacks(self) -> list[tuple[str, dict[str, Any]]]:
        """Import path of each of the Trainer's callbacks, with the arguments that are given."""
        given = self.trainer.given.get("callbacks")
        found = []
        for value in given if isinstance(given, list) else [given]:
            path, arguments = (value.get("class_path"), value.get("init_args")) if isinstance(value, dict) else (value, None)
            if isinstance(path, str):
                found.append((path, arguments if isinstance(arguments, dict) else {}))
        return found

    @property
    def sp_size(self) -> int:
        """Sequence-parallel size, 1 unless it is a whole number of at least 1."""
        return self.strategy.number("sequence_parallel_size") or 1

    @property
    def replicate_size(self) -> int:
        """Copies of the sharded parameters, 1 unless it is a whole number of at least 1."""
        return self.strategy.number("data_parallel_replicate_size") or 1

    @property
    def longest_sample(self) -> int | None:
        """Most tokens of a sample that the configuration allows; None if only the data knows."""
        prompt, response = self.data.number("max_prompt_length"), self.data.number("max_response_length")
        return None if prompt is None or response is None else prompt + response

    @property
    def sharded(self) -> bool:
        """Whether parameters are sharded over ranks."""
        return "RLBatchFSDPStrategy" in self.strategy.ancestors


def run_config(config: dict[str, Any], world_size: int | None = None) -> RunConfig:
    """Interpret a configuration.

    Args:
        config: From ``read_config``.
        world_size: Number of ranks; None takes ``devices`` x ``num_nodes``.
    """
    trainer = config.get("trainer") if isinstance(config.get("trainer"), dict) else {}
    assert isinstance(trainer, dict)
    strategy = _section("trainer.strategy", trainer.get("strategy"))
    if strategy.class_path.startswith("rlbatch_fsdp"):
        known = class_source("lightning_rlbatch.RLBatchFSDPStrategy")
        assert known is not None
        strategy = Section(strategy.key, strategy.class_path, strategy.given, known.options, known.ancestors)
    known = class_source("lightning.pytorch.Trainer")
    return RunConfig(
        model=_section("model", config.get("model")),
        data=_section("data", config.get("data")),
        strategy=strategy,
        trainer=Section("trainer", "lightning.pytorch.Trainer", trainer, None if known is None else known.options),
        others={key: value for key, value in config.items() if key not in ("model", "data", "trainer")} | _strays(config),
        world_size=world_size or _num_ranks(trainer),
    )


def _section(key: str, value: Any) -> Section:
    if not isinstance(value, dict) or not isinstance(value.get("class_path"), str):
        return Section(key)
    given = value.get("init_args")
    source = class_source(value["class_path"])
    return Section(
        key,
        value["class_path"],
        given if isinstance(given, dict) else {},
        None if source is None else source.options,
        frozenset() if source is None else source.ancestors,
    )


def _strays(config: dict[str, Any]) -> dict[str, Any]:
    """Return what stands in a section beside its class and arguments."""
    sections = {key: config.get(key) for key in ("model", "data")}
    return {
        f"{key}.{name}": value
        for key, section in sections.items()
        if isinstance(section, dict)
        for name, value in section.items()
        if name not in ("class_path", "init_args", "dict_kwargs")
    }


def _num_ranks(trainer: dict[str, Any]) -> int | None:
    devices, nodes = trainer.get("devices", "auto"), trainer.get("num_nodes", 1)
    if isinstance(devices, list):
        devices = len(devices)
    elif isinstance(devices, str):
        devices = int(devices) if devices.isdigit() else len(devices.split(",")) if "," in devices else None
    valid = isinstance(devices, int) and isinstance(nodes, int) and devices >= 1 and nodes >= 1
    return devices * nodes if valid else None


def load_pure(module: str) -> ModuleType:
    """Import one of this package's modules that needs the standard library only, without its package's ``__init__`` (which loads torch).

    Args:
        module: Such as ``functional.sizes``.
    """
    name = f"lightning_rlbatch.{module}"
    if name in sys.modules:
        return sys.modules[name]
    alias = f"_lightning_rlbatch_{module.replace('.', '_')}"
    if alias not in sys.modules:
        path = Path(lightning_rlbatch.__file__).parent / f"{module.replace('.', '/')}.py"
        spec = importlib.util.spec_from_file_location(alias, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[alias] = loaded  # dataclasses look their module up while they are made
        spec.loader.exec_module(loaded)
    return sys.modules[alias]
