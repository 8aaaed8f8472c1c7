"""The strategy for ``pytorch_lightning``, the twin whose Trainer refuses classes of ``lightning.pytorch``."""

from pytorch_lightning.strategies import DDPStrategy

from lightning_replicate.strategy.lifecycle import ReplicateLifecycle


class ReplicateStrategy(ReplicateLifecycle, DDPStrategy):
    __doc__ = ReplicateLifecycle.__doc__
