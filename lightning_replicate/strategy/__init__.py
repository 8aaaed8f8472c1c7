"""The upper floor: ties the core into Lightning's Trainer.

Read ``selection`` (which submodules), then ``lifecycle`` (set-up, step, tear-down), then ``trainer``: the thin class.
"""
