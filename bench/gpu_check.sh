#!/usr/bin/env bash
# Builds for the GPU at hand and checks everything that only a GPU can tell; docs/gpu.md says what and how.
#   bench/gpu_check.sh OUT    writes OUT/summary.md, OUT/summary.json and what they refer to; under 8 minutes
# Exits with 1 where the build or a test failed, with 2 where there is no GPU.
set -euo pipefail
out=$(realpath -m "${1:?usage: bench/gpu_check.sh OUT}")
cd "$(dirname "$0")/.."
exec "${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}" -m bench.gpu_check "$out"
