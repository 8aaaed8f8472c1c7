"""The strategy for ``pytorch_lightning``, the twin whose Trainer refuses classes of ``lightning.pytorch``."""

from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities import CombinedLoader

from lightning_replicate.strategy.lifecycle import ReplicateLifecycle


class ReplicateStrategy(ReplicateLifecycle, DDPStrategy):
    __doc__ = ReplicateLifecycle.__doc__
    combined_loader = CombinedLoader
