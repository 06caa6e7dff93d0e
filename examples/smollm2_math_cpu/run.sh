#!/usr/bin/env bash
# Critique-GRPO on SmolLM2-135M-Instruct, on any machine without a GPU:
#   run.sh [key.path=value …]      e.g. run.sh data.path=problems.jsonl rollout.max_response_tokens=128
# Prepares what is missing (model, addition problems), trains, and ends with one line that says
# whether the run's own invariants held; exit code 0 only if they did.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
python=${PYTHON:-$repo/.venv/bin/python}
if [ ! -x "$(command -v "$python")" ]; then
  echo "error: no Python at $python; run \`make install\` first or set PYTHON" >&2
  exit 2
fi

"$python" "$here/prepare.py" --model "$here/model" --additions "$here/additions.jsonl"

# Paths in config.yaml are relative to this folder; those given by the caller to where it stands.
overrides=(model.path="$here/model" data.prompt_file="$here/prompt.txt"
  feedback.refine_prompt="$here/refine.txt" data.path="$here/additions.jsonl")
name=additions
for item in "$@"; do
  case $item in
    data.path=*) name=$(basename "${item#data.path=}"); name=${name%.*} ;;
  esac
done
overrides+=(run.name="smollm2-$name" "$@")
for item in "${overrides[@]}"; do
  case $item in
    run.directory=*) directory=${item#run.directory=} ;;
    run.name=*) run=${item#run.name=} ;;
  esac
done

"$python" -m megatron_cgrpo.cli train "$here/config.yaml" "${overrides[@]}"
flags=()
# Two-digit additions are partly right from the start; other problems may all fail at first.
[ "$name" = additions ] && flags+=(--rewards-vary)
exec "$python" "$here/summary.py" "${directory:-runs}/$run" "${flags[@]}"
