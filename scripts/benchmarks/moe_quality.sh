#!/usr/bin/env bash
# The validation loss of a small mixture beside that of the dense model with as many active
# parameters, on the quickstart's corpus (scripts/quickstart.sh makes it): the quickstart's model at
# half its depth, width and length. One process each, both at the same time.
#   STEPS=600 bash scripts/benchmarks/moe_quality.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
steps=${STEPS:-600}
common=(machine=laptop model.layers=2 model.hidden=64 model.sequence_length=64 train.micro_batch=32
    "train.steps=$steps" "schedule.warmup_steps=$((steps / 15))" "evaluate.every=$((steps / 6))"
    checkpoint.every=0 preflight.enabled=false)
export OMP_NUM_THREADS=1
for name in quickstart moe-quickstart; do
    own=()
    [ "$name" = quickstart ] || own=(model.moe.ffn_hidden=48)
    rm -rf "runs/quality-$name"
    "${PYTHON:-.venv/bin/python}" -m megafrontier train "configs/$name.yaml" \
        "run.name=quality-$name" "${common[@]}" ${own[@]+"${own[@]}"} >"runs/quality-$name.txt" &
done
wait
for name in quickstart moe-quickstart; do
    printf '%s\n' "$name"
    grep valid_loss "runs/quality-$name/metrics.jsonl"
done
