#!/usr/bin/env bash
# What the device does in a serving step, and in one call of each implementation: kernels, launches, waits, gaps.
#   bench/profile.sh OUT    prints one table and writes it to OUT/profile-<device>.json
# Under nsys where there is a GPU and nsys can report, else under torch's profiler. Exits with 1 where a step waits
# for the device.
set -euo pipefail
out=$(realpath -m "${1:?usage: bench/profile.sh OUT}")
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
device=$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')
mkdir -p "$out"
if [ "$device" = cuda ] && command -v nsys >/dev/null; then
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  if nsys profile --output "$scratch/steps" --trace cuda,nvtx --cuda-graph-trace node --sample none --cpuctxsw none \
    --capture-range cudaProfilerApi --capture-range-end stop "$python" -m bench.profile_steps run &&
    nsys export --type sqlite --output "$scratch/steps.sqlite" "$scratch/steps.nsys-rep"; then
    "$python" -m bench.profile_steps nsys "$scratch/steps.sqlite" --out "$out"
    exit
  fi
  echo "nsys cannot report: torch's profiler instead"
fi
"$python" -m bench.profile_steps torch --device "$device" --out "$out"
