"""Say what goes wrong while it goes wrong."""

import dataclasses
import math
import statistics
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_rlbatch.callbacks.doctor_history import History
from lightning_rlbatch.callbacks.doctor_rules import RULES, Diagnosis, Thresholds, diagnose


class UnhealthyTraining(RuntimeError):  # noqa: N818 - names a state of the run, as Lightning's SIGTERMException does
    """A rule of :class:`TrainingDoctor` fired in strict mode."""


class TrainingDoctor(Callback):
    """Watch the metrics of every iteration, say in sentences what looks wrong and what to try.

    Rules: the first ratio of an iteration is not 1; entropy collapse; reward hacking by length; KL blow-up; mismatch of engine and
    trainer; clip fraction; groups without variance; truncation; starving prompts; skipped steps; a useless critic. Thresholds and their
    sources are in :class:`Thresholds`. A diagnosis is reported when it appears, not while it lasts; ``diagnoses`` keeps all of them,
    and ``doctor/num_findings`` is logged at the end of every iteration.

    All ranks see the same metrics, so in strict mode all of them stop together.

    Args:
        thresholds: When a number is alarming.
        ignore: Names of rules that are left out.
        strict: True raises :class:`UnhealthyTraining` at the first diagnosis instead of a warning.

    Raises:
        ValueError: ``ignore`` names no rule.

    Example::

        Trainer(callbacks=[TrainingDoctor(thresholds=Thresholds(truncated=0.5), ignore=["engine_mismatch"])])
    """

    def __init__(self, thresholds: Thresholds = Thresholds(), *, ignore: list[str] | None = None, strict: bool = False) -> None:
        unknown = sorted(set(ignore or []) - RULES.keys())
        if unknown:
            raise ValueError(f"Expected ignore to hold names of rules but got {', '.join(unknown)}. Rules: {', '.join(RULES)}.")
        self.thresholds = thresholds
        self.ignore = list(ignore or [])
        self.strict = strict
        self.diagnoses: list[Diagnosis] = []
        self._history = History(window=thresholds.window)
        self._steps: list[dict[str, float]] = []
        self._present: set[str] = set()

    @override
    def on_train_batch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._steps.append({name: value for name, value in found.items() if math.isfinite(value) and not name.startswith("val/")})

    @override
    def on_train_epoch_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if not self._steps:
            return
        names = {name for step in self._steps for name in step}
        means = {name: statistics.fmean(step[name] for step in self._steps if name in step) for name in names}
        if "train/ratio" in self._steps[0]:
            means["first_ratio"] = self._steps[0]["train/ratio"]
        self._steps = []
        self._history.add(means)
        iteration = trainer.current_epoch
        found = [finding for finding in diagnose(self._history, self.thresholds) if finding.name not in self.ignore]
        found = [dataclasses.replace(finding, iteration=iteration) for finding in found]
        new = [finding for finding in found if finding.name not in self._present]
        self._present = {finding.name for finding in found}
        self.diagnoses += new
        # The values are equal on all ranks; sync_dist only keeps Lightning from warning.
        pl_module.log("doctor/num_findings", float(len(found)), sync_dist=True)
        if new and self.strict:
            raise UnhealthyTraining("\n".join(map(str, new)))
        for finding in new:
            rank_zero_warn(f"TrainingDoctor: {finding}")

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"history": self._history.state_dict(), "present": sorted(self._present)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._history.load_state_dict(state_dict["history"])
        self._present = set(state_dict["present"])
