"""The upper floor: ties the core into Lightning's Trainer.

Read ``selection`` (which submodules), ``marking`` (who owns which parameter), ``inputs`` (uneven data), ``precision``
(loss scaling), ``lifecycle`` (set-up, step, tear-down) and ``trainer``: the thin class.
"""
