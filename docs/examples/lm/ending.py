"""How a process of the job ends: at once, whether it was interrupted or is done.

Promises: Ctrl-C does not wait for a collective whose other ranks are gone, and a finished process does not stumble
over its own teardown. Both are safe at any moment, because whatever the job keeps is written under another name
first and then renamed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DISMISSED = b"\0"


class Farewell:
    """Ends the process on SIGINT or SIGTERM with exit code 128 + signal, after writing ``text`` to stderr.

    Made in the main thread, before anything that may block. ``text`` may be changed at any time; empty: silent.

    Python runs a signal handler only when the main thread is back in the interpreter, which a blocked collective
    may never be. The C-level handler writes the signal's number to a pipe, and a thread reads it.
    """

    def __init__(self, text: str = "") -> None:
        self.text = text
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        signal.set_wakeup_fd(self._write_end)
        for number in SIGNALS:
            signal.signal(number, _leave_to_the_thread)
        self._thread = threading.Thread(target=self._wait, args=(read_end,), daemon=True, name="farewell")
        self._thread.start()

    def dismiss(self) -> None:
        """The job is over: from now on a signal no longer changes how the process ends."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.write(self._write_end, DISMISSED)
        self._thread.join()

    def _wait(self, read_end: int) -> None:
        word = os.read(read_end, 1)
        if word == DISMISSED:
            return
        if self.text:
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            os.write(2, f"{show_cursor}\n{self.text}\n".encode())
        os._exit(128 + word[0])


def _leave_to_the_thread(number: int, frame: object) -> None:
    """A handler in Python must exist for the signal's number to reach the pipe."""


def leave(code: int) -> NoReturn:
    """End the process with ``code``, without the interpreter's teardown.

    A thread of gloo's that lets go of the last collective's tensors during that teardown aborts the process
    (seen with torch 2.13), which would turn a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
