#!/usr/bin/env bash
# What to run when a GPU is at hand for ten minutes, in the order of importance: probes of CUDA and NCCL if PROBES names
# some (gpu_probes.py; "all": some ten minutes more); the self-test; whole runs with a fault each; the tests that need a
# GPU. One machine, from the repository's root, without a network. Without a GPU, all but these tests runs on the CPU.
#
#   tools/experiments/gpu_session.sh FOLDER
#
# Results in FOLDER, or in $OUT, each as soon as it is there: machine.txt (GPU, driver, packages), probes.jsonl,
# selftest.txt and selftest.json (ft selftest), whole.txt (exit code, end of the output and report of each whole run),
# tests.txt, and logs.tar.gz (all logs, and the result of each check as it ends). The last one is packed again every
# 15 s, so that little is lost if this is cut off; the files are few because some machines return only a few.
# MINUTES is the time of the self-test (5), WHOLE_S that of a whole run (60 s; 0: none), TESTS_S that of the tests
# (90 s; 0: none). Wheels for this Python in the folder .whl (megatron-core and what it needs, where pip cannot reach an
# index) are installed outside the repository first. The exit code is that of ft selftest.
set -uo pipefail

out=${1:-${OUT:?give the folder for the results}}
minutes=${MINUTES:-5} whole_s=${WHOLE_S:-60} tests_s=${TESTS_S:-90}
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)

pack() {
    local packed="$out/.logs.$BASHPID"
    tar --create --gzip --file "$packed" --directory "$work" --exclude=site --exclude='*.draft' . 2> /dev/null
    mv "$packed" "$out/logs.tar.gz"
}
while sleep 15; do pack; done &
packer=$!
trap 'kill "$packer"; wait "$packer" 2> /dev/null; pack; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT

tag=$("$python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
wheels=()
for wheel in .whl/*.whl; do
    case $wheel in
        *-"$tag"-*.whl | *-py3-none-*.whl | *-py2.py3-none-*.whl) wheels+=("$wheel") ;;
        *) [[ ! -e $wheel ]] || echo "not for $tag: $wheel" >> "$out/machine.txt" ;;
    esac
done
if ((${#wheels[@]})); then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "${wheels[@]}" || exit 2
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

{
    date --utc
    uname -a
    timeout 20 nvidia-smi
    timeout 20 nvidia-smi topo -m
    fields=index,name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current
    timeout 20 nvidia-smi --query-gpu="$fields" --format=csv
    "$python" -m pip list 2> /dev/null
} >> "$out/machine.txt" 2>&1

if "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then has_gpu=1; else has_gpu=0; fi

probes=${PROBES:-}
if [[ -n $probes ]]; then
    only=()
    if [[ $probes != all ]]; then read -ra only <<< "--only $probes"; fi
    if ((!has_gpu)); then only+=(--dry-run); fi
    "$python" tools/experiments/gpu_probes.py --out "$out/probes.jsonl" ${only[@]+"${only[@]}"}
fi

# The compiled digests of the CPU; without a compiler, plain torch computes them.
has_digests='from ft.systems.dmr.digest import native; raise SystemExit(native.library() is None)'
"$python" -c "$has_digests" 2> /dev/null || "$python" setup.py --quiet build_ext --inplace > "$work/build.txt" 2>&1

"$python" -m ft selftest --minutes "$minutes" --run-dir "$work/selftest" 2>&1 | tee "$out/selftest.txt"
code=${PIPESTATUS[0]}
cp "$work/selftest/selftest.json" "$out/" 2> /dev/null

model="--micro-batch-size 2 --global-batch-size 12 --train-iters 20 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
    --vocab-size 2000 --position-embedding-type rope --eval-iters 0 --log-interval 10 --num-workers 0
    --reference-trainer --use-distributed-optimizer --deterministic-mode"
if ((has_gpu)); then
    model+=" --num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16"
else
    model+=" --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
fi

# Train with an agent for each worker, as on so many nodes. All workers share the first GPU, which NCCL allows to ranks
# with different host ids. Arguments: name, number of workers, flags of ft run, flags of the script.
whole() {
    local name=$1 workers=$2 run=$3 script=$4 port node code agents=()
    port=$("$python" -c 'from ft.platform.network import free_port; print(free_port("127.0.0.1"))')
    for ((node = 0; node < workers; node++)); do
        # shellcheck disable=SC2086  # the flags are words
        env CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" NCCL_HOSTID="whole$node" NCCL_MULTI_RANK_GPU_ENABLE=1 \
            NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 \
            timeout --kill-after=15 "$whole_s" "$python" -m ft run --nnodes "$workers" --node-rank "$node" \
            --rdzv-endpoint "127.0.0.1:$port" --local-addr 127.0.0.1 --nproc-per-node 1 --run-dir "$work/whole/$name" \
            --inject-strict $run pretrain_gpt.py $model $script > "$work/whole/$name-$node.txt" 2>&1 &
        agents+=($!)
    done
    wait "${agents[0]}"
    code=$?
    wait "${agents[@]}"
    {
        echo "== $name: exit code $code (124: not over after $whole_s s)"
        tail -n 25 "$work/whole/$name-0.txt"
        timeout 60 "$python" -m ft report "$work/whole/$name" 2>&1
    } | tee -a "$out/whole.txt"
}
if ((whole_s)); then
    mkdir -p "$work/whole"
    whole hot-swap 3 "--standby-nodes 1 --inject kill@step=1:rank=1,kill@step=10:rank=1" "--ft-hot-swap"
    whole replicas 2 "--ft-hsdp-replicas 2 --ft-hsdp-wait 30s --inject kill@replica=1:step=5:rank=0" ""
    whole spare 3 "--ft-hsdp-replicas 3 --ft-spare-redundancy 2 --inject kill@replica=1:step=5:rank=0" ""
    whole dmr 2 "--inject bit-flip@step=5:rank=1:operator=mm:phase=backward" "--ft-hot-swap --ft-dmr piggyback"
fi

# The tests that are skipped without a GPU, FILE::NAME.
if ((tests_s && has_gpu)) && "$python" -c 'import pytest' 2> /dev/null; then
    mapfile -t tests < <(grep -rA 3 --include='test_*.py' 'skipif(not torch.cuda.is_available' tests |
        sed -nE 's/^([^:]+\.py)-def (test_[a-z0-9_]+)\(.*/\1::\2/p')
    timeout "$tests_s" "$python" -m pytest -q -p no:cacheprovider -m '' "${tests[@]}" 2>&1 | tee "$out/tests.txt"
fi
exit "$code"
