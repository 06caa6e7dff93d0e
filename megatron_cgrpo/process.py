"""Child processes that do not outlive their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ask a rank to stop after its step. Slurm sends its warning (USR1: launch/) to all processes of a
job, also to those that must go on until then."""
_PR_SET_PDEATHSIG = 1
_forks_die = False


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process when the thread that started it ends (Linux).

    A process killed by SIGKILL cannot clean up; without this its children would run on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sig)


def child_of_a_rank(sig: signal.Signals = signal.SIGKILL) -> None:
    """What a process that a rank starts does first (preexec): it dies with the rank, by `sig`, and
    lets the rank alone decide what a warning means."""
    die_with_parent(sig)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """Processes that a library starts in this block never see a stop signal; this one sees it when
    the block ends."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
