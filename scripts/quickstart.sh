#!/usr/bin/env bash
# From raw text to a trained, resumed, exported model on any Linux with Python 3.11 and no GPU.
# The text is the installed Python's own standard library, its documentation files included.
# STEPS shortens the training: STEPS=20 bash scripts/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv train report
megafrontier=.venv/bin/megafrontier
steps=${STEPS:-300}
half=$(((steps + 1) / 2))
data=runs/quickstart-data
run=runs/quickstart
started=$SECONDS

say() { printf '\n== %s\n' "$*"; }

rm -rf "$run" "$run-hf" "$data"
mkdir -p "$data"
library=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
mapfile -t texts < <(
    find "$library" \( -name site-packages -o -name test -o -name tests -o -name lib2to3 \) -prune \
        -o \( -name '*.py' -o -name '*.txt' -o -name '*.rst' \) -print | sort
)

say "train a tokenizer on ${#texts[@]} files of $library"
"$megafrontier" tokenizer "${texts[@]}" --vocab-size 2048 --out "$data/tokenizer" \
    --max-megabytes 4 --skip-bad

say "prepare the corpus"
"$megafrontier" prepare "${texts[@]}" --tokenizer "$data/tokenizer" --out "$data/corpus" \
    --append-eod --skip-bad

say "train to step $half of $steps on 8 local ranks, then stop"
"$megafrontier" train configs/quickstart.yaml --nproc 8 "train.steps=$steps" "train.stop_at=$half"

say "resume and finish"
"$megafrontier" train configs/quickstart.yaml --nproc 8 "train.steps=$steps"

say "export to Hugging Face"
"$megafrontier" export "$run" --out "$run-hf"

say "generate"
"$megafrontier" generate "$run" --prompt 'def read(self' --max-new-tokens 60 --temperature 0.7 \
    --top-p 0.95 --seed 1

say "report"
"$megafrontier" report "$run"

.venv/bin/python - "$run" <<'PY'
import json, sys

lines = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
train = [line["loss"] for line in lines if "loss" in line]
valid = [line["valid_loss"] for line in lines if "valid_loss" in line]
last = train[-10:]
print(f"\ntrain loss  {train[0]:.3f} at step 1, {sum(last) / len(last):.3f} over the last {len(last)} steps")
print(f"valid loss  {valid[-1]:.3f} at step {lines[-1]['step']}")
assert sum(last) / len(last) < train[0], "the loss did not fall"
PY
cat <<END
run         $run (config.yaml, metrics.jsonl, log.txt, checkpoints/)
report      $run/report.html
model       $run-hf (open with transformers)
seconds     $((SECONDS - started)) after the installation
END
