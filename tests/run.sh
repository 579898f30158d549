#!/usr/bin/env bash
# Installs what the tests need and runs them, on each processor those of one file at a time; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh
install_debian_packages
prepare_environment dev,mpi
python -m ruff check .
lint-imports --no-logo
python -m mypy
exec python -m pytest "${side_by_side[@]}" "$@"
