"""The command line. `main` is the console script `miles`; commands import what they need when they are called."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 2 bad configuration or arguments, 130 interrupted, 1 anything else."""
    gc.disable()  # modules make no garbage while they load, and looking for it is a tenth of `miles check`
    try:
        from miles.cli.app import run

        sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))
    finally:
        gc.enable()
