"""From losses of tokens to the loss of a batch, one mean a file: (counts, *, max_tokens) -> weights.

`counts[g][i]` is the number of trained tokens of sequence i of group g, and `weights[g][i]` what each of its tokens'
loss is multiplied by before all are summed up. Made for the whole batch at once, so how it is cut never matters.
"""
