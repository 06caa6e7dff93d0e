"""How much wrong feedback does Critique-GRPO bear? The quickstart, its critiques disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_cgrpo.config import parse_config
from megatron_cgrpo.studies.quickstart import STEPS, build_world, quickstart_config
from megatron_cgrpo.studies.report import plot_bars, print_rows, write_csv
from megatron_cgrpo.studies.runs import run_to_the_end, summarize

SHARES = (0.0, 0.05, 0.1, 0.2)


def run_noise_study(
    directory: str, seed: int = 0, steps: int | None = None, kind: str = "flip"
) -> int:
    """Train once for each share of disturbed critiques; writes noise.csv and noise.png.

    Returns:
        0, or the exit code of the first run that failed.
    """
    root = Path(directory).absolute()
    names = {share: f"noise_{round(100 * share):02d}" for share in SHARES}
    for name in ("world", *names.values()):
        shutil.rmtree(root / name, ignore_errors=True)
    policy = build_world(root / "world", seed)
    rows = []
    for share, name in names.items():
        print(f"\n== {share:.0%} of critiques disturbed ({kind})", flush=True)
        config = quickstart_config(root, policy, "critique_grpo", seed, steps or STEPS)
        raw = config.model_dump(mode="json")
        raw["run"]["name"] = name
        raw["feedback"]["noise"] = {"share": share, "kind": kind}
        code = run_to_the_end(parse_config(raw))
        if code:
            return code
        result = summarize(root / name)
        rows.append(
            {
                "disturbed": f"{share:.0%}",
                "accuracy before %": round(100 * result["accuracy_before"], 1),
                "accuracy after %": round(100 * result["accuracy"], 1),
            }
        )
    write_csv(root / "noise.csv", rows)
    title = f"held-out accuracy with disturbed critiques ({kind})"
    plot_bars(root / "noise.png", title, rows, "disturbed", list(rows[0])[1:])
    print_rows(title, rows)
    print(f"{root / 'noise.csv'}, {root / 'noise.png'}")
    return 0
