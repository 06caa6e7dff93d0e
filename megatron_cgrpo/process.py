"""Child processes that do not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
_forks_die = False


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process when the thread that started it ends (Linux).

    A process killed by SIGKILL cannot clean up; without this its children would run on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sig)


@contextlib.contextmanager
def forks_die_with_parent() -> Iterator[None]:
    """Processes that a library forks in this block die with this thread, and theirs with them."""
    global _forks_die
    before, _forks_die = _forks_die, True
    try:
        yield
    finally:
        _forks_die = before


def _after_fork() -> None:
    if _forks_die:
        die_with_parent()


os.register_at_fork(after_in_child=_after_fork)
