#!/usr/bin/env bash
# Installs a wheel into a clean environment beside the torch of .venv and runs it there.
#   tools/check_wheel.sh dist/specmeta-*.whl
set -euo pipefail
wheel=$(realpath "$1")
venv=$(realpath "$(dirname "$0")/../.venv")
clean=$(mktemp -d)
trap 'rm -rf "$clean"' EXIT
"$venv/bin/python" -m venv "$clean/venv"
# torch and what it needs come from .venv by path, so that nothing is downloaded again; specmeta itself is hidden.
"$clean/venv/bin/pip" install --quiet --no-deps "$wheel"
cd "$clean"
site=$("$venv/bin/python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)')
echo "import sys; sys.path.append('$site')" >"$(echo "$clean"/venv/lib/python*/site-packages)/zz_torch.pth"
"$clean/venv/bin/python" - <<PYTHON
import specmeta
assert specmeta.__file__.startswith("$clean"), specmeta.__file__
PYTHON
"$clean/venv/bin/specmeta" doctor
"$clean/venv/bin/specmeta" generate --prompt "It was a fine morning" --max-new-tokens 8
