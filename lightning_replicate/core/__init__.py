"""The lower floor: data-parallel replication for plain torch. Nothing here knows Lightning.

Read in this order: ``api`` (plain types), ``failures`` (what a rank tells of its own), ``layout`` (parameters to
buckets) and ``planning`` (where to cut them), ``bucket`` (one flat buffer), ``sparse`` (a sparse gradient instead),
``wire`` (how it travels), ``agreement`` (what all ranks must agree on), ``group`` (parameters and their agreed
layout), ``hooks`` (what runs once a parameter), ``reducer`` (one group's round), ``channel`` (all groups of one
process group), ``buffers``, ``marks`` (what sits on a module), ``collect`` (which parameters a call manages),
``stepping`` (what optimizers step with), ``lazy`` (modules whose parameters come later), ``switches`` (what a user sets
around a step), ``state`` (one ``replicate()`` call) and ``replicate`` (the entry point). ``dtensor``, ``clipping`` and
``names`` stand by themselves; ``hook_state`` is what a checkpoint keeps of a communication hook.
"""
