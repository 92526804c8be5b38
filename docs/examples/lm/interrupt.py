"""Ctrl-C and termination: this process ends at once, wherever it is.

Promises: the exit does not wait for a collective whose other ranks are gone. Python runs a signal handler only
when the main thread is back in the interpreter, which a blocked collective may never be; the C-level handler
writes the signal's number to a pipe at once, and a thread that reads it ends the process. Safe at any moment,
because whatever the job keeps is written under another name first and then renamed.
"""

from __future__ import annotations

import os
import signal
import threading

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DISMISSED = b"\0"


class Farewell:
    """Ends the process on SIGINT or SIGTERM with exit code 128 + signal, after writing ``text`` to stderr.

    Made in the main thread, before anything that may block. ``text`` may be changed at any time; empty: silent.
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
        """The job is over: the process is about to end by itself, and a signal no longer changes its exit code."""
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
