"""Importance corrections, one a file: (log_ratio, tokens, **options) -> what each token's loss is multiplied by.

`log_ratio` [n] is log(proximal / behaviour), without gradient: how much likelier each token has become under the
trainer's weights before the step than it was under the engine that sampled it.
"""
