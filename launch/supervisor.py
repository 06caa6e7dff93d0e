"""Runs the script of a job on its first node and decides what becomes of the job.

    python3 supervisor.py RUN_DIRECTORY [--requeue] [--max-restarts N] [--backoff-s S] -- COMMAND…

The trainer says in `outcome`, a file of the run directory, how the run ended (training/cluster.py):

- done: the job's exit code is 0;
- stopped, because it was asked to, with a checkpoint: 85, and the job goes on at once;
- guard (going on would waste time): 3, and refused (another attempt will not mend it): 1, are not
  tried again, nor by the next job of a chain;
- nothing: it was killed or crashed. The exit code is the command's, and the job is tried again
  `max_restarts` times, after pauses that double.

Standard library only: it runs with the host's Python, outside of any container, from a copy in the
run directory.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

OUTCOME = "outcome"
FAILURES = "failures"
"""File of the run directory with a line for each attempt that ended without an outcome."""
EXIT_CODES = {"done": 0, "stopped": 85, "guard": 3, "refused": 1}
FINAL = ("done", "guard", "refused")
LONGEST_PAUSE_S = 600
CANCELLED = 128 + signal.SIGTERM


def read_outcome(root):
    """(outcome, reason); ("", "") where the run left none that we know."""
    try:
        word, _, reason = (root / OUTCOME).read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        return "", ""
    return (word.strip(), reason.strip()) if word.strip() in EXIT_CODES else ("", "")


def exit_code(outcome, code):
    """The job's exit code. Slurm's own may be that of a task that was ended because another left;
    one of 0 without an outcome is no success."""
    return EXIT_CODES[outcome] if outcome else code or 1


def pause_s(failures, backoff_s):
    """Seconds before the retry after so many failures."""
    return min(backoff_s * 2 ** (failures - 1), LONGEST_PAUSE_S)


def next_try(outcome, failures, max_restarts, backoff_s):
    """Seconds after which the job is to be tried again; None: it is not.

    Args:
        failures: of the run so far, with this one.
    """
    if outcome == "stopped":
        return 0
    if outcome or failures > max_restarts:
        return None
    return pause_s(failures, backoff_s)


def count_failure(root, code):
    """Note a failure of this job; returns how many there have been."""
    job, attempt = (os.environ.get(f"SLURM_{n}", "0") for n in ("JOB_ID", "RESTART_COUNT"))
    with open(root / FAILURES, "a", encoding="utf-8") as f:
        f.write(f"job {job} attempt {attempt} exit code {code}\n")
    return len((root / FAILURES).read_text(encoding="utf-8").splitlines())


def say(message):
    print(message, flush=True)


class Supervisor:
    """One job. A SIGTERM to it means that Slurm ends the job: nothing is decided any more."""

    def __init__(self, args):
        self.args, self.root = args, Path(args.root)
        self.child = None
        self.cancelled = threading.Event()

    def run(self):
        """The job's exit code."""
        outcome, reason = read_outcome(self.root)
        if outcome in FINAL:
            # An earlier job of the chain has said all.
            if outcome != "done":
                say(f"not tried again: {reason}")
            return EXIT_CODES[outcome]
        (self.root / OUTCOME).unlink(missing_ok=True)
        # Slurm's warning is for the ranks alone. (Ignored, it would be ignored by them too.)
        signal.signal(signal.SIGUSR1, lambda signum, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        # The command is the job's script once more: it sees by this that it is supervised.
        env = dict(os.environ, CGRPO_SUPERVISED=os.environ["SLURM_JOB_ID"])
        self.child = subprocess.Popen(self.args.command, env=env)
        if self.cancelled.is_set():
            self.child.terminate()
        code = self.child.wait()
        if self.cancelled.is_set():
            return CANCELLED
        outcome, reason = read_outcome(self.root)
        # A negative code: the command died of a signal.
        code = exit_code(outcome, code if code >= 0 else 128 - code)
        if self.args.requeue and outcome != "done":
            self._try_again(outcome, reason, code)
        return code

    def _end(self, signum, frame):
        self.cancelled.set()
        if self.child is not None:
            self.child.terminate()

    def _try_again(self, outcome, reason, code):
        failures = 0 if outcome else count_failure(self.root, code)
        wait = next_try(outcome, failures, self.args.max_restarts, self.args.backoff_s)
        if wait is None:
            say(f"not tried again: {reason}" if outcome else f"given up after {failures} failures")
            return
        say("stopped with a checkpoint" if outcome else f"tried again in {wait} s")
        if not self.cancelled.wait(wait):
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="the run directory")
    parser.add_argument("--requeue", action="store_true", help="requeue a job that can go on")
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--backoff-s", type=int, default=30)
    parser.add_argument("command", nargs="+")
    return Supervisor(parser.parse_args(argv)).run()


if __name__ == "__main__":
    sys.exit(main())
