#!/usr/bin/env bash
# Checks the sources and runs a tier of the tests, on each processor those of one file at a time. What they need is
# installed the first time.
#
#     tests/run.sh              the default tier: all tests but the long ones
#     tests/run.sh fast         the tests of tests/pure: decisions, planners, parsers
#     tests/run.sh long         the long tests: campaigns, rare combinations, most commands of the documents
#     tests/run.sh ARGUMENTS    what pytest makes of the arguments
#
# The slowest files and tests are in build/durations.txt afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh
case "${1:-}" in
fast) set -- tests/pure "${@:2}" ;;
long) set -- -m long "${@:2}" ;;
esac
install_debian_packages
prepare_environment dev,mpi
check_sources
# With a blank in place of the first "=" pytest would take the file, from the second run on, for the tests that are meant.
exec python -m pytest "${side_by_side[@]}" --durations-file=build/durations.txt "$@"
