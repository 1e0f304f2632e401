#!/usr/bin/env bash
# Installs a wheel into a clean environment and runs it there.
#   tools/check_wheel.sh dist/specmeta-*.whl                  beside the torch of .venv: nothing is downloaded
#   tools/check_wheel.sh dist/specmeta-*.whl torch==2.10.0    beside another torch, with the tests of the operations
set -euo pipefail
wheel=$(realpath "${1:?usage: tools/check_wheel.sh WHEEL [torch==VERSION]}")
root=$(realpath "$(dirname "$0")/..")
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
"$root/.venv/bin/python" -m venv "$clean/venv"
"$clean/venv/bin/pip" install --quiet --no-deps "$wheel"
cd "$clean"
"$clean/venv/bin/python" -c "
import os, specmeta, specmeta.cupy  # there is no torch yet
assert os.path.exists(specmeta.get_include() + '/specmeta.h') and os.path.exists(specmeta.get_library())"
if [ $# -gt 1 ]; then
  "$clean/venv/bin/pip" install --quiet "$2" numpy pytest hypothesis tqdm
  cp -r "$root/tests" "$root/pyproject.toml" .
  tests=(tests/test_cases.py tests/test_errors.py tests/test_batch.py tests/test_large.py)
  tests+=(tests/test_advance.py tests/test_stage.py tests/test_accept.py tests/test_draft_step.py tests/test_observe.py)
  "$clean/venv/bin/python" -m pytest -q "${tests[@]}"
else
  # The packages of .venv by path; specmeta itself is not among them, since .venv has it as an editable install.
  site=$("$root/.venv/bin/python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)')
  echo "import sys; sys.path.append('$site')" >"$(echo "$clean"/venv/lib/python*/site-packages)/zz_torch.pth"
  "$clean/venv/bin/specmeta" generate --prompt "It was a fine morning" --max-new-tokens 8 --trace run.jsonl
  "$clean/venv/bin/specmeta" trace run.jsonl -o page.html
fi
"$clean/venv/bin/python" -c "import specmeta; assert specmeta.__file__.startswith('$clean'), specmeta.__file__"
"$clean/venv/bin/specmeta" doctor
