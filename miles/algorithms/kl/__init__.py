"""Estimators of KL(policy || reference) from one sampled token, one a file, for floats and for tensors.

Source: Schulman, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html).
"""
