"""The upper floor: ties the core into Lightning's Trainer.

Read ``selection`` (which submodules) and ``marking`` (who owns which parameter), then ``lifecycle`` (set-up, step,
tear-down), then ``trainer``: the thin class.
"""
