"""Run as a script: ask the kernel to kill this process when its parent's thread ends, then become the command.

    python -I -S die_with_parent.py PARENT_PID COMMAND [ARGS...]

The wish survives exec. Doing it here, and not between fork and exec of the parent, keeps Python code out of a forked
copy of a process with many threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the wish was made
        sys.exit("the parent is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]!r}: {error.strerror}")


if __name__ == "__main__":
    main()
