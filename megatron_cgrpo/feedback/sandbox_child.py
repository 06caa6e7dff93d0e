"""Runs one program apart from the machine. Started by `sandbox.run_program`, as a script.

Arguments: directory to work in, 1 to use namespaces, CPU seconds, bytes of memory, bytes per file.
The program comes on standard input. Where the kernel allows user namespaces it has no network, sees
no other process, and can write only to a small disk of its own.
"""

import ctypes
import os
import resource
import signal
import sys

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _RDONLY, _SYS_MOUNT_SETATTR = -100, 0x8000, 1, 442
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65534
_DISK = b"size=64m,mode=700"
_PROCESSES = 64
PROGRAM = "program.py"
FAILED, NO_MOUNTS = 97, 98
"""Exit codes when the sandbox could not be made; the second where it can without namespaces."""

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def leave_namespaces() -> None:
    """New namespaces for users, mounts, processes, network and IPC; raises OSError if refused."""
    uid, gid = os.getuid(), os.getgid()
    # Not root inside either: exec must drop the capabilities that setting up needs.
    inner = _NOBODY if uid == 0 else uid
    check(libc.unshare(_NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner} {uid} 1"),
        ("gid_map", f"{_NOBODY if gid == 0 else gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)


def mount_private(directory: str) -> None:
    """Everything read-only but a small disk at `directory`; a /proc without other processes."""
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    attributes = (ctypes.c_uint64 * 4)(_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    where = (ctypes.c_int(_AT_FDCWD), b"/", ctypes.c_uint(_AT_RECURSIVE))
    check(libc.syscall(_SYS_MOUNT_SETATTR, *where, ctypes.byref(attributes), size))
    flags = _MS_NOSUID | _MS_NODEV
    if libc.mount(b"proc", b"/proc", b"proc", flags, None) != 0:
        # Some containers allow no new /proc; the old one would show the trainer's environment.
        check(libc.mount(b"none", b"/proc", b"tmpfs", flags, None))
    check(libc.mount(b"none", directory.encode(), b"tmpfs", flags, _DISK))


def limit(cpu_s: int, memory: int, file_bytes: int, isolated: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if isolated:
        # Outside of a namespace it would count all processes of the user.
        limits[resource.RLIMIT_NPROC] = _PROCESSES
    for name, value in limits.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def read_program() -> bytes:
    """A line with its length, then the program; what follows stays for the program to read."""
    length = b""
    while not length.endswith(b"\n"):
        length += os.read(0, 1)
    program = b""
    while len(program) < int(length):
        program += os.read(0, int(length) - len(program))
    return program


def execute(directory: str, limits: tuple[int, int, int], isolated: bool) -> None:
    """Does not return."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    limit(*limits, isolated)
    environment = {"PATH": "/usr/bin:/bin", "HOME": directory, "TMPDIR": directory}
    environment |= {"LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    os.execve(sys.executable, [sys.executable, "-I", "-B", PROGRAM], environment)


def first_process(directory: str, program: bytes, limits: tuple, isolated: bool) -> int:
    """Process 1 of the namespace: when it ends, the kernel kills all others there."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if isolated:
        try:
            mount_private(directory)
        except OSError as e:
            print(f"sandbox: {e}", file=sys.stderr, flush=True)
            return NO_MOUNTS
    os.chdir(directory)
    with open(PROGRAM, "wb") as f:
        f.write(program)
    second = os.fork()
    if second == 0:
        execute(directory, limits, isolated)
    code = wait(second)
    return code if code >= 0 else 128 - code


def main(directory: str, isolate: bool, limits: tuple[int, int, int]) -> int:
    program, parent, isolated = read_program(), os.getppid(), False
    if isolate:
        try:
            leave_namespaces()
            isolated = True
        except OSError:
            pass
    # After the change of user, which clears it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return FAILED
    first = os.fork()
    if first == 0:
        os._exit(guarded(first_process, directory, program, limits, isolated))
    return wait(first)


def guarded(action, *args) -> int:
    """The exit code of an action; FAILED, and what it was, for an error before the program runs."""
    try:
        return action(*args)
    except Exception as e:
        print(f"sandbox: {type(e).__name__}: {e}", file=sys.stderr, flush=True)
        return FAILED


if __name__ == "__main__":
    os._exit(guarded(main, sys.argv[1], sys.argv[2] == "1", tuple(int(a) for a in sys.argv[3:6])))
