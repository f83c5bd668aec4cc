"""What a user's module may hold: classes of ours with an argument more, or with fewer."""

from lightning.pytorch.callbacks import Callback

from lightning_rlbatch.data import RolloutDataModule
from lightning_rlbatch.modules import PPOModule
from lightning_rlbatch.strategies import RLBatchFSDPStrategy


def reward(completions):
    return [0.0] * len(completions)


class OwnPPO(PPOModule):
    def __init__(self, own: int = 3, **kwargs):
        super().__init__(**kwargs)
        self.own = own


class NarrowPPO(PPOModule):
    """Takes nothing of what the configuration sets but the policy."""

    def __init__(self, policy: str, own: int = 3):
        super().__init__(policy=policy, reward_functions=[reward])
        self.own = own


class OwnData(RolloutDataModule):
    def __init__(self, *args, more: int = 1, **kwargs):
        super().__init__(*args, **kwargs)


class OwnStrategy(RLBatchFSDPStrategy):
    def __init__(self, knob: int = 1, **kwargs):
        super().__init__(**kwargs)


class OwnCallback(Callback):
    def __init__(self, x: int = 1):
        self.x = x
