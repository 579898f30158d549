#!/usr/bin/env bash
# Installs what the tests need and runs them; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh
prepare_environment dev,mpi
python -m ruff check .
lint-imports --no-logo
python -m mypy
exec python -m pytest "$@"
