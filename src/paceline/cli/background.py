"""Work that goes on while the user types."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread, main_thread


class Background:
    """A function that runs in a thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Start `work`."""
        self._work = work
        self._error: BaseException | None = None
        self._lock, self._interrupts = Lock(), False
        self._thread = Thread(target=self._run, name="paceline-background")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            with self._lock:
                self._error = error
                if self._interrupts and hasattr(signal, "pthread_kill"):
                    signal.pthread_kill(main_thread().ident or 0, signal.SIGINT)

    @property
    def done(self) -> bool:
        """True if the work has ended."""
        return not self._thread.is_alive()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise the error of the work within this block of the main thread, even while it waits for input.

        Windows reports the error only at the start of a block.
        """
        try:
            with self._lock:
                self._interrupts = self._error is None
            if self._error is not None:
                raise self._error
            yield
        except KeyboardInterrupt:
            raise self._error or KeyboardInterrupt from None
        finally:
            self._interrupts = False

    def join(self) -> None:
        """Wait until the work has ended. Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
