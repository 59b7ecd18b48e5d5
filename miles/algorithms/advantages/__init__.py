"""From rewards to advantages, in plain floats, one function a file: (groups, **options) -> advantages.

`groups[g][i]` is the `Sample` i of group g, and the answer of the same shape holds one number for a sample, or one for
each of its trained tokens (so that a critic has its place). The whole batch is seen at once. `batch` decides who takes
part.
"""
