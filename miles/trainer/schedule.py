"""The course of the learning rate, as a function of the step's number alone. Torch-free: any trainer can use it."""

from __future__ import annotations

import math

from miles.trainer.options import TrainerOptions


def learning_rate(options: TrainerOptions, step: int) -> float:
    """The rate of RL step `step`, counted from 1: linear climb, then a fall to a fraction of the peak, then flat.

    The fall is linear, half a cosine (Loshchilov & Hutter 2017, one cycle), or none at all (`constant`).
    A pure function of the step number, so that a resumed run cannot advance its schedule twice.
    """
    warmup, end = options.lr_warmup_steps, options.lr_decay_steps
    if step <= warmup:
        return options.lr * step / warmup
    if options.lr_schedule == "constant":
        return options.lr
    progress = min(1.0, (step - warmup) / (end - warmup)) if end > warmup else 1.0
    if options.lr_schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2
    return options.lr * (1.0 - progress * (1.0 - options.lr_final_fraction))
