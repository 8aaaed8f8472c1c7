"""``python -m lightning_replicate.consolidate FOLDER FILE``: makes one checkpoint file of a checkpoint in parts."""

from __future__ import annotations

import argparse

from lightning_replicate.strategy.folder import consolidate

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="what `save_distributed_checkpoint=True` wrote")
    parser.add_argument("file", help="where the checkpoint goes")
    given = parser.parse_args()
    consolidate(given.folder, given.file)
