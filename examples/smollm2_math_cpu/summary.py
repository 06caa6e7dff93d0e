"""One line about a run, and exit code 0 only if its invariants held."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

MAX_ENGINE_GAP = 1e-3


def main(run: Path, rewards_vary: bool) -> int:
    expected = yaml.safe_load((run / "config.yaml").read_text())["training"]["steps"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "reward/initial" in r]
    kept = sum(r["samples/refinements_kept"] for r in steps)
    gap = max(r["policy/engine_gap_max"] for r in steps)
    checks = {
        f"{expected} steps": len(steps) == expected,
        "ratio = 1 at first updates": all(r["policy/first_max_log_ratio"] == 0 for r in steps),
        f"engine gap ≤ {MAX_ENGINE_GAP}": gap <= MAX_ENGINE_GAP,
        "refinements present": kept > 0,
        "learning signal": sum(r["optimizer/updates"] for r in steps) > 0,
    }
    if rewards_vary:
        checks["rewards not constant"] = any(0 < r["reward/initial"] < 1 for r in steps)
    broken = [name for name, held in checks.items() if not held]

    def each(key: str, digits: int) -> str:
        return ", ".join(f"{r[key]:.{digits}f}" for r in steps)

    print(
        f"{'FAILED: ' + ', '.join(broken) if broken else 'OK'}  steps {len(steps)}  "
        f"rewards {each('reward/initial', 3)}  refined {each('reward/refined', 3)}  "
        f"refinements kept {kept:.0f}  engine gap {gap:.1e}  "
        f"seconds a step {each('time/step_s', 0)}"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--rewards-vary" in sys.argv))
