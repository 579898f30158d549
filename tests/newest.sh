#!/usr/bin/env bash
# Runs the tests on the newest stack: the newest Python found, with the megatron-core and torch that pip chooses there.
# Arguments go to pytest; `tests/newest.sh -m newest` is the part that CI runs, one of each kind of run. The tests have
# no capability of the kernel and 1024 file descriptors.
#
# The environment takes some 6 GB and stays outside the checkout. PYTHON=... chooses the interpreter, MEGATRON_FT_ENVS
# the folder of such environments (default: ~/.cache/megatron-ft).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh

python=${PYTHON:-$(newest_python)}
[ -n "$python" ] || give_up "there is no Python 3.12 or newer" "install one, or name it: PYTHON=/path/to/python3.13"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || give_up "$python does not run" "name another one"
envs=${MEGATRON_FT_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-ft}
if [ ! -x "$envs/python$version/bin/python" ]; then
    echo "making $envs/python$version with $("$python" --version) (once; 6 GB)"
    "$python" -m venv "$envs/python$version"
fi
unset CONDA_PREFIX
. "$envs/python$version/bin/activate"
prepare_environment dev,mpi
python - <<'PYTHON'
import platform
from importlib.metadata import version

print(f"== Python {platform.python_version()}, megatron-core {version('megatron-core')}, torch {version('torch')}")
PYTHON
as_plain_user python -m pytest "${side_by_side[@]}" "$@"
