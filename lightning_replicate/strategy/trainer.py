"""The strategy for ``lightning.pytorch``."""

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader

from lightning_replicate.strategy.lifecycle import ReplicateLifecycle


class ReplicateStrategy(ReplicateLifecycle, DDPStrategy):
    __doc__ = ReplicateLifecycle.__doc__
    combined_loader = CombinedLoader
