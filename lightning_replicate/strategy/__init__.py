"""The upper floor: ties the core into Lightning's Trainer.

Read ``selection`` (which submodules) and ``marking`` (who owns which parameter); ``inputs`` (uneven data) and
``stopping``; ``mesh``, ``sharding``, ``lockstep`` (sharded modules), ``optimizers`` and ``precision`` (both kinds of
parameters); ``folder`` (checkpoints in parts). The strategy is put together from ``steps``, ``mixed`` (what it does for
sharded modules), ``checkpoint`` and ``lifecycle``; ``trainer`` is the thin class.
"""
