"""What a long-running command needs of its process: to end when told, and not to outlive whoever started it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

PARENT_PIPE = "FARFLUNG_PARENT_PIPE"
EXIT_SECONDS = 2.0


def end_with_parent(environment: Mapping[str, str] = os.environ) -> None:
    """If `FARFLUNG_PARENT_PIPE=1`, end this process when standard input does: the kernel closes the pipe however the
    parent dies. SIGTERM first; after two seconds without effect, exit."""
    if environment.get(PARENT_PIPE) == "1":
        threading.Thread(target=_watch, name="parent", daemon=True).start()


def exit_within(seconds: float, code: int) -> None:
    """Exit with `code` if the process is still there after so many seconds: a thread that hangs in a name look-up or
    on a slow disk holds up no shutdown. What must be durable is written by rename, so nothing is torn."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _watch() -> None:
    descriptor = sys.stdin.fileno()
    while os.read(descriptor, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_SECONDS)
    os._exit(1)
