#!/usr/bin/env bash
# What to run when a GPU is at hand for ten minutes: the self-test in its order of importance, the tests that need a GPU,
# and, if PROBES names some, probes of CUDA and NCCL (gpu_probes.py; "all": some ten minutes more). One machine, from the repository's root, without a network.
#
#   tools/experiments/gpu_session.sh FOLDER
#
# Results in FOLDER, or in $OUT: machine.txt (GPU, driver, packages), probes.jsonl (a line as soon as a probe has ended),
# selftest.json and selftest.txt (ft selftest), logs.tar.gz (all logs). MINUTES is the time of the self-test (8), TESTS_S that of the tests (90 s; 0: none).
# Wheels in the folder .whl (megatron-core and what it needs, where pip cannot reach an index) are installed outside the
# repository first. The exit code is that of ft selftest.
set -uo pipefail

out=${1:-${OUT:?give the folder for the results}}
minutes=${MINUTES:-8} tests_s=${TESTS_S:-90}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if compgen -G ".whl/*.whl" > "$work/wheels"; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" .whl/*.whl || exit 2
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

{
    date --utc
    uname -a
    timeout 20 nvidia-smi
    timeout 20 nvidia-smi topo -m
    timeout 20 nvidia-smi --query-gpu=index,name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current --format=csv
    "$python" -m pip list 2> /dev/null
} > "$out/machine.txt" 2>&1

probes=${PROBES:-}
if [[ -n $probes ]]; then
    only=()
    if [[ $probes != all ]]; then read -ra only <<< "--only $probes"; fi
    "$python" tools/experiments/gpu_probes.py --out "$out/probes.jsonl" ${only[@]+"${only[@]}"}
fi

# The compiled digests of the CPU; without a compiler, plain torch computes them.
has_digests='from ft.systems.dmr.digest import native; raise SystemExit(native.library() is None)'
"$python" -c "$has_digests" 2> /dev/null || "$python" setup.py --quiet build_ext --inplace > "$work/build.txt" 2>&1

"$python" -m ft selftest --minutes "$minutes" --run-dir "$work/selftest" 2>&1 | tee "$out/selftest.txt"
code=${PIPESTATUS[0]}
cp "$work/selftest/selftest.json" "$out/" 2> /dev/null

if ((tests_s)) && "$python" -c 'import pytest' 2> /dev/null; then
    timeout "$tests_s" "$python" -m pytest -q -p no:cacheprovider -m '' \
        tests/processes/test_dmr_digest.py tests/end_to_end/test_faults_every_kind.py \
        -k 'gpu or lost_cuda_context' 2>&1 | tee "$work/tests.txt"
fi
find "$work" -name '*.draft' -delete
tar --create --gzip --file "$out/logs.tar.gz" --directory "$work" --exclude=site .
exit "$code"
