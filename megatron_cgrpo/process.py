"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send `sig` to this process when the thread that started it ends (Linux).

    A process killed by SIGKILL cannot clean up; without this its children would run on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, sig)
