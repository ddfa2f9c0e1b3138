#!/usr/bin/env bash
# Schedules that decay beside a constant rate whose last checkpoints are averaged, on the
# quickstart's text and model: 600 steps of 2,048 tokens, each seed in one process. Needs the data
# of scripts/quickstart.sh. A run that is complete is not run again.
#   SEEDS="1 2 3" bash scripts/benchmarks/averages.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1
megafrontier=${MEGAFRONTIER:-.venv/bin/megafrontier}
out=${OUT:-runs/averages} steps=${STEPS:-600} every=10
common=(machine=laptop train.global_batch=16 train.micro_batch=16 "train.steps=$steps"
    optimizer.lr="${LR:-3e-3}" schedule.min_lr=2e-5 evaluate.every=0 evaluate.batches=32
    checkpoint.minutes=0 preflight.enabled=false)

loss() { # of the last evaluation in a file of metrics
    sed -n 's/.*"valid_loss": \([0-9.]*\).*/\1/p' "$1" | tail -1
}

for seed in ${SEEDS:-1 2 3}; do
    for schedule in cosine wsd constant; do
        run=$out/$schedule-$seed
        saves=(checkpoint.every=0)
        [ $schedule != constant ] || saves=("checkpoint.every=$every" checkpoint.keep=24)
        "$megafrontier" train configs/quickstart.yaml "${common[@]}" "${saves[@]}" run.directory="$run" \
            run.seed="$seed" schedule.name=$schedule >>"$out-output.txt"
        echo "seed $seed, $schedule: $(loss "$run/metrics.jsonl")"
    done
    for weights in mean linear; do
        for last in 6 12 24; do
            average=$run-$weights-$last
            [ -e "$average" ] || "$megafrontier" checkpoint average "$run" --out "$average" --last $last \
                --weights $weights >>"$out-output.txt"
            found=$("$megafrontier" evaluate "$average" | sed -n 's/.*loss \([0-9.]*\).*/\1/p' | head -1)
            echo "seed $seed, constant, $weights of $last: $found"
        done
    done
done
