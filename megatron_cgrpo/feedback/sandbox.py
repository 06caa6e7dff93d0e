"""Running a program that nobody has read, in a child process with limits."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_cgrpo.feedback.sandbox_child import FAILED, NO_MOUNTS

_CHILD = Path(__file__).with_name("sandbox_child.py")
_FILE_BYTES = 16 << 20
_OUTPUT = 4000
_PROBE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """How a program ended: exit code (None: killed at the time limit), ends of its outputs."""

    code: int | None
    stdout: str
    stderr: str


def run_program(source: str, timeout_s: float, memory_mib: int, stdin: str = "") -> Outcome:
    """Run Python source with limits on time, memory, processes and file sizes.

    The program and all it starts are killed at the limit. It gets no environment of ours. See
    `not_isolated` for what this machine cannot keep from it.

    Args:
        timeout_s: wall-clock and CPU seconds.
        memory_mib: address space of each of its processes.
        stdin: what it can read.

    Raises:
        OSError: when the sandbox cannot be made.
    """
    if _namespaces[0]:
        outcome = _run(source, timeout_s, memory_mib, stdin, True)
        if outcome.code != NO_MOUNTS:
            return outcome
        # User namespaces without the right to mount, as some distributions have them.
        _namespaces[0] = False
    return _run(source, timeout_s, memory_mib, stdin, False)


_namespaces = [True]


def _run(source: str, timeout_s: float, memory_mib: int, stdin: str, isolate: bool) -> Outcome:
    with (
        tempfile.TemporaryDirectory(prefix="cgrpo-") as directory,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        limits = (int(timeout_s) + 1, memory_mib << 20, _FILE_BYTES)
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), directory, str(int(isolate))]
            + [str(n) for n in limits],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        program = source.encode("utf-8", "replace")
        try:
            sent = b"%d\n%b%b" % (len(program), program, stdin.encode())
            child.communicate(sent, timeout=timeout_s)
            code = child.returncode
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(child)
            if not isolate:
                _kill_left(directory)
        outcome = Outcome(code, _end(out), _end(err))
    if code == FAILED and outcome.stderr.startswith("sandbox: "):
        raise OSError(outcome.stderr.strip())
    return outcome


def _kill_left(directory: str) -> None:
    """What a program started in sessions of its own, known by its environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == directory:
                process.kill()
        except psutil.Error:
            continue


def _kill(child: subprocess.Popen) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def _end(file) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT))
    return file.read().decode("utf-8", "replace")


_PROBE = """
import os, socket
missing = []
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=2).close()
    missing.append("the network")
except OSError:
    pass
try:
    open({outside!r}, "w").close()
    missing.append("files that this user may write")
except OSError:
    pass
try:
    os.kill({pid}, 0)
    missing.append("this user's processes")
except OSError:
    pass
print(", ".join(missing))
"""


@functools.cache
def not_isolated() -> str:
    """What a program can reach here although it should not, in words; empty where all is kept.

    Raises:
        OSError: when not even the probe runs.
    """
    import socket

    with tempfile.TemporaryDirectory() as outside, socket.create_server(("127.0.0.1", 0)) as s:
        probe = _PROBE.format(
            port=s.getsockname()[1], outside=str(Path(outside) / "x"), pid=os.getpid()
        )
        outcome = run_program(probe, _PROBE_S, 512)
    if outcome.code != 0:
        raise OSError(f"a program cannot be run in the sandbox: {outcome.stderr.strip()}")
    return outcome.stdout.strip()
