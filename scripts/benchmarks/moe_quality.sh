#!/usr/bin/env bash
# The validation loss of a small mixture beside that of the dense model with as many active
# parameters, on the quickstart's text (Python's standard library) as bytes: the quickstart's model
# at half its depth and length, 48 wide. One process each, both at the same time.
#   STEPS=800 bash scripts/benchmarks/moe_quality.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
steps=${STEPS:-800}
data=runs/moe-quality-data
common=(machine=laptop tokenizer=bytes "data.train=[{path: $data/corpus}]" model.vocab_size=257
    model.layers=2 model.hidden=48 model.sequence_length=64 model.init_std=0.06
    train.global_batch=16 train.micro_batch=16 optimizer.lr=2e-3 schedule.min_lr=1e-4
    "train.steps=$steps" "schedule.warmup_fraction=0.0667" "evaluate.every=$((steps / 4))"
    evaluate.batches=32 checkpoint.every=0 checkpoint.minutes=0 preflight.enabled=false)
export OMP_NUM_THREADS=1

library=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
mapfile -t texts < <(
    find "$library" \( -name site-packages -o -name test -o -name tests -o -name lib2to3 \) -prune \
        -o \( -name '*.py' -o -name '*.txt' -o -name '*.rst' \) -print | sort
)
rm -rf "$data"
mkdir -p "$data"
"$python" -m megafrontier prepare "${texts[@]}" --tokenizer bytes --out "$data/corpus" \
    --append-eod --skip-bad

for name in quickstart moe-quickstart; do
    own=()
    [ "$name" = quickstart ] || own=(model.moe.ffn_hidden=64)
    rm -rf "runs/quality-$name"
    "$python" -m megafrontier train "configs/$name.yaml" "run.name=quality-$name" \
        "${common[@]}" ${own[@]+"${own[@]}"} >"runs/quality-$name.txt" &
done
wait
for name in quickstart moe-quickstart; do
    printf '%s\n' "$name"
    grep valid_loss "runs/quality-$name/metrics.jsonl"
done
