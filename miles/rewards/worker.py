"""A worker process: calls a person's reward function in its main thread, one call after the other.

In the main thread, because verifiers like to set SIGALRM, which works nowhere else; in a process, because one that
hangs can then be ended, and one that computes leaves the event loop alone. `miles.rewards.worker_process` starts it
as `python -m miles.rewards.worker`, says over standard input which function, and then sends calls.
Messages in both directions are pickles behind a length of 4 bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import sys
from typing import Any, BinaryIO

from miles.rewards.verdict import Answer, Verdict, describe, judge

LENGTH_BYTES = 4

_PR_SET_PDEATHSIG = 1


def frame(message: object) -> bytes:
    """A message as it goes over the pipe."""
    body = pickle.dumps(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def _read(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError when the other side is gone."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        raise EOFError
    return pickle.loads(stream.read(int.from_bytes(head, "little")))


def _end_with_parent(parent: int) -> None:
    """End when the driver does, also in the middle of a call, where nobody reads standard input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def _call(function: Any, arguments: tuple[Any, ...]) -> Answer:
    try:
        value = function(*arguments)
        if inspect.isawaitable(value):  # a plain function that hands on a coroutine
            value = asyncio.run(_wait_for(value))
        return judge(value)
    except Exception as error:  # noqa: BLE001 - whatever a person's function raises is reported and counted
        return Verdict.ERROR, describe(error)


async def _wait_for(value: Any) -> Any:
    return await value


def main() -> None:
    """Serve calls until standard input closes."""
    _end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver decides when this ends
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints must not come between the messages
    try:
        sys.path[:], name = _read(requests)
        from miles.rewards.reward import load_reward

        try:
            function = load_reward(name).call
        except Exception as error:  # noqa: BLE001 - reported to the driver
            replies.write(frame((Verdict.ERROR, describe(error))))
            return
        replies.write(frame((Verdict.SCORED, None)))
        replies.flush()
        while True:
            replies.write(frame(_call(function, _read(requests))))
            replies.flush()
    except (EOFError, BrokenPipeError):
        return
    finally:
        replies.close()


if __name__ == "__main__":
    main()
