"""Warnings that are not errors in this test suite, each with its reason. Everything else fails a test."""

KNOWN_WARNINGS: list[tuple[str, str, type[Warning]]] = [
    # torch 2.13 deprecates a check that Lightning 2.6 still makes in its own tree utilities
    ("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    # advice about data-loading workers and log frequency, of no use for tests of a few batches
    ("ignore", r"The '\w+' does not have many workers", UserWarning),
    ("ignore", r"The number of training batches \(\d+\) is smaller than the logging interval", UserWarning),
    # tests pass one tensor without a batch size to measure
    ("ignore", r"Trying to infer the `batch_size` from an ambiguous collection", UserWarning),
    # the advice itself is what the tests of `test` do: they compare all ranks' results
    ("ignore", r"Using `DistributedSampler` with the dataloaders", UserWarning),
]
