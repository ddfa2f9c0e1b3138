#!/usr/bin/env bash
# The validation loss of a small mixture beside that of the dense model with as many active
# parameters, on the quickstart's corpus (scripts/quickstart.sh makes it): the quickstart's model at
# half its depth, width and length. One process each, all at the same time.
#   STEPS=300 bash scripts/benchmarks/moe_quality.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
steps=${STEPS:-300}
common=(machine=laptop model.layers=2 model.hidden=64 model.sequence_length=64 train.micro_batch=32
    "train.steps=$steps" "schedule.warmup_steps=$((steps / 15))" evaluate.every=50 checkpoint.every=0
    preflight.enabled=false)
export OMP_NUM_THREADS=1
for balance in dense bias loss; do
    config=configs/moe-quickstart.yaml
    own=("model.moe.balance=$balance" model.moe.ffn_hidden=96)
    [ "$balance" != dense ] || { config=configs/quickstart.yaml && own=(); }
    run=runs/moe-quality-$balance
    rm -rf "$run"
    "${PYTHON:-.venv/bin/python}" -m megafrontier train "$config" "run.name=moe-quality-$balance" \
        "${common[@]}" ${own[@]+"${own[@]}"} >"$run.txt" &
done
wait
for balance in dense bias loss; do
    printf '%-6s' "$balance"
    grep valid_loss "runs/moe-quality-$balance/metrics.jsonl" | tail -1
done
