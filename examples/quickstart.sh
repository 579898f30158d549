#!/usr/bin/env bash
# Trains a small Llama-style GPT on the Python standard library's own sources: 4 processes, PP 2 x DP 2, on the CPU.
# Then trains it again for a while, kills a worker in the middle, and shows how a standby took its place.
# Everything it makes is under runs/quickstart (or the folder given as first argument). A second argument, above 80,
# ends the first training after so many steps. It works with either trainer (docs/training.md): NVIDIA's where the
# installed megatron-core carries it, otherwise the reference trainer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. tools/environment.sh
prepare_environment dev

run=${1:-runs/quickstart} steps=${2:-480}
corpus=$run/data/stdlib
mkdir -p "$run/data"
started=$SECONDS

echo "== corpus: the standard library's sources, tokenised into Megatron's indexed format"
python tools/preprocess_data.py \
    --input "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" --include '*.py' \
    --exclude test tests site-packages dist-packages --shuffle-seed 1 --max-mb 12 \
    --output-prefix "$corpus"

model=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --pipeline-model-parallel-size 2 --use-distributed-optimizer
    --micro-batch-size 8 --global-batch-size 32 --train-iters 480
    --lr 4e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 15 --adam-beta2 0.95 --weight-decay 0.1
    --data-path "$corpus" --split 98,2,0 --eval-iters 8
)

echo "== training: 4 processes, metrics in $run/metrics.jsonl"
rm -rf "$run/checkpoints"
OMP_NUM_THREADS=1 python -m torch.distributed.run --standalone --nproc-per-node 4 pretrain_gpt.py \
    "${model[@]}" --exit-duration-in-mins 3 --exit-interval "$steps" --eval-interval 80 \
    --save "$run/checkpoints" --log-interval 20 --metrics-file "$run/metrics.jsonl"

echo "== loss curve"
python tools/plot_loss.py --metrics "$run/metrics.jsonl" --dataset "$corpus" --output "$run/loss.png" \
    --title "GPT on the Python standard library, PP 2 x DP 2 on CPU"

echo "== a sample of what it learned"
python tools/generate_text.py --load "$run/checkpoints" --prompt 'def ' --tokens 200

echo "== the first 80 steps again, with a standby; the worker of rank 2 is killed in the middle of step 50"
rm -rf "$run/hot-swap"
ft run --nproc-per-node 4 --standby 1 --run-dir "$run/hot-swap" --inject 'kill@step=50:rank=2:phase=backward' \
    pretrain_gpt.py "${model[@]}" --exit-interval 80 --log-interval 20 --eval-interval 80 \
    --metrics-file "$run/hot-swap/metrics.jsonl" --ft-hot-swap
ft report "$run/hot-swap"

python - "$run" "$corpus" $((SECONDS - started)) <<'PYTHON'
import json
import sys
from pathlib import Path

from megatron.ft_trainer.data.tokenizer import read_sidecar

run, corpus, seconds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def metrics(path):
    return [json.loads(line) for line in open(path)]


undisturbed, killed = metrics(run / "metrics.jsonl"), metrics(run / "hot-swap" / "metrics.jsonl")
losses = [step["validation_loss"] for step in undisturbed if "validation_loss" in step]
entropy = read_sidecar(corpus).unigram_entropy
same = [step["loss"] for step in killed] == [step["loss"] for step in undisturbed[: len(killed)]]
verdict = "the same, bit for bit, as without" if same else "NOT the same as without"
print(f"""== done in {seconds} s
  validation loss   {losses[-1]:.3f} nats per byte; the corpus's unigram entropy is {entropy:.3f}
  loss curve        {run / "loss.png"}
  metrics           {run / "metrics.jsonl"}
  checkpoint        {run / "checkpoints"}
  dataset           {corpus}.bin, .idx, .meta.json
  with a kill       the losses of all {len(killed)} steps are {verdict}
  report            {run / "hot-swap" / "report.html"}, timeline.png beside it""")
if not same:
    sys.exit(1)
PYTHON
