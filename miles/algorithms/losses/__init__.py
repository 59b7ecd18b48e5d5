"""Policy losses, one a file: (tokens, old, **options) -> TokenLoss. They use tensors by their methods only.

So none imports torch, and `miles check` can read their options.
"""
