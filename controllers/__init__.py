"""The control plane: which engines live, what they serve, and who may use them.

It moves no weight bytes and knows no prompts.
"""
