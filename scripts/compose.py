"""Random models on random layouts, stopped and continued on others, beside one process.

    python -m scripts.compose --seed 1 --cases 300 --out compose.jsonl

A case is a random model, optimizer and data, and two random layouts of up to 8 local CPU ranks. It
trains on the first, and goes on from that run's checkpoint on the second. Both must give one
process's losses, gradients, states and evaluations (`megafrontier.certify`). Each case is a line of
JSON. Cases that are in the file already are not run again. The exit code is 1 if any case has a
gap, fails or does not end.

A gap is judged beside the rounding of one process (`megafrontier.certify.promises`, Note
[Rounding]). If the bound would be more than `MOST_ROUNDING`, because tokens go to other experts, a
larger gap shows nothing: the case is open.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megafrontier.certify.certificate import Finding, worst
from megafrontier.certify.command import computing_alone
from megafrontier.certify.miniature import RECORDER, SAVED, STEPS, alone, exact
from megafrontier.certify.promises import (
    Laboratory,
    beside_rounding,
    compare_after_resume,
    compare_runs,
    may_be_rounding,
)
from megafrontier.certify.runs import TrialFailed, write_corpora
from megafrontier.common.errors import UserError
from megafrontier.config import Config, config_from_dict
from megafrontier.plan.refuse import check_layout

MANY_TRIES = 500
MOST_ROUNDING = 0.05
"""A larger bound would show nothing."""

Choices = Mapping[str, list[Any]]
"""Of a key of the configuration. The first one suits the most others."""

MODEL: Choices = {
    "layers": [4, 3, 2],
    "kv_heads": [None, 1, 2],
    "norm": ["layernorm", "rmsnorm"],
    "norm_position": ["before", "before", "after", "both"],
    "activation": ["gelu", "swiglu", "swiglu_clipped", "geglu", "relu2"],
    "position": ["rotary", "rotary", "learned"],
    "rotary_fraction": [1.0, 1.0, 0.5],
    "parallel_residual": [False, False, True],
    "tie_embeddings": [False, True],
    "bias": [True, False],
    "qk_norm": ["none", "none", "head", "full"],
    "logit_softcap": [None, None, 20.0],
    "vocab_size": [61, 64],
    "attention": [
        {},
        {},
        {"window": 9},
        {"window": 9, "global_every": 2},
        {"softcap": 20.0},
        {"sinks": True},
        {"output_gate": True},
        {"pattern": ["delta", "full"],
         "delta": {"key_heads": 4, "value_heads": 8, "key_size": 6, "value_size": 5}},
        {"latent": {"query": 12, "key_value": 8, "rope_size": 4, "nope_size": 4, "value_size": 6}},
    ],
    "moe": [
        None,
        None,
        {"experts": 8, "active": 2, "ffn_hidden": 24, "bias_rate": 0.01},
        {"experts": 8, "active": 2, "ffn_hidden": 24, "balance": "loss", "z_loss": 0.01,
         "bias": True, "router_bias": True},
        {"experts": 8, "active": 3, "ffn_hidden": 24, "shared_experts": 1, "router": "sigmoid",
         "groups": {"number": 4, "active": 2, "best": 2}, "first": 1},
        {"experts": 4, "active": 1, "ffn_hidden": 24, "every": 2, "balance": "none"},
    ],
    "prediction": [None, None, None, {"coefficient": 0.3}],
}  # fmt: skip
TRAINING: Choices = {
    "train.z_loss": [0.0, 0.01],
    "train.clip_grad_norm": [0.0, 1.0],
    "train.global_batch": [24, 12, 12, 16],
    "train.batch_warmup": [None, None, {"start": 12, "step_by": 12, "until": 2}],
    "train.loss_chunk_tokens": [20, 1024],
    "optimizer.name": ["adamw", "adamw", "sgd"],
    "optimizer.ema": [0.0, 0.5],
    "optimizer.qk_clip": [0.0, 0.0, 4.0],
    "optimizer.groups": [
        [],
        [],
        [{"match": "matrix:blocks.*", "name": "muon", "lr": 0.01}],
        [{"match": "embedding", "lr": 0.003, "weight_decay": 0.05}],
    ],
    "schedule.warmup_steps": [0, 2],
    "schedule.weight_decay.start": [1.0, 1.0, 0.0],
    "schedule.weight_decay.end": [1.0, 1.0, 5.0],
    "data.document_mask": [False, True],
    "data.packing": ["none", "none", "best_fit"],
}
LAYOUT: Choices = {
    "train.micro_batch": [1, 1, 2],
    "train.activation_checkpointing": ["none", "block", "selective", "offload"],
    "parallel.tensor": [1, 1, 2, 4],
    "parallel.context": [1, 1, 2, 4],
    "parallel.expert": [1, 2, 4],
    "parallel.token_pieces": [1, 1, 2],
    "parallel.dispatch": ["auto", "auto", "flat"],
    "parallel.pipeline": [1, 1, 2, 4],
    "parallel.stages_per_rank": [1, 1, 2],
    "parallel.schedule": ["1f1b", "interleaved", "zero_bubble"],
    "partition.strategy": ["ddp", "zero1", "zero2", "zero3", "mics", "hpz", "topo", None],
    "partition.overlap": ["none", "safe", "full"],
    "partition.prefetch": [0, 1, 3],
    "partition.overlap_update": [False, False, True],
    "partition.offload.optimizer": ["none", "none", "cpu"],
    "partition.weights_copy": [True, True, False],
    "checkpoint.asynchronous": [False, True],
}
VALUES = {f"model.{name}": some for name, some in MODEL.items()} | TRAINING
RANKS = (2, 4, 4, 6, 8)
LEVELS = {
    2: [[2], [1, 2], [2, 1]],
    4: [[4], [2, 2], [1, 4]],
    6: [[6], [2, 3], [3, 2]],
    8: [[8], [2, 4], [2, 2, 2], [4, 2]],
}
FREE = ("none", "pair", "node", "world")
"""Levels of a placement without a strategy: weights, gradients and optimizer ascend."""


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--cases", type=int, default=300)
    arguments.add_argument("--out", type=Path, default=Path("compose.jsonl"))
    given = arguments.parse_args()
    done = finished(given.out)
    with computing_alone(), given.out.open("a") as file:
        for number in range(given.cases):
            key = f"{given.seed}-{number}"
            if key in done:
                continue
            done[key] = run_case(key)
            file.write(json.dumps(done[key]) + "\n")
            file.flush()
            print(f"{key}: {done[key]['status']} {done[key]['worst']}", flush=True)
    return int(any(line["status"] == "broken" for line in done.values()))


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of earlier runs, by case."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["case"]: line for line in map(json.loads, lines)}


def run_case(key: str) -> dict[str, Any]:
    """Run a case, and say what was found."""
    begin, dice = time.monotonic(), random.Random(key)
    folder = Path(tempfile.mkdtemp(prefix="compose-"))
    try:
        values, layouts = draw(dice, folder)
        line = {"case": key, "values": values, "layouts": layouts}
        finding = worst(findings(values, layouts, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = f"{finding.promise}: {finding.figure} of {finding.bound} {finding.where}"
    return line | {
        "status": finding.status,
        "worst": text,
        "seconds": round(time.monotonic() - begin, 1),
    }


def findings(
    values: dict[str, Any], layouts: list[dict[str, Any]], folder: Path
) -> Iterator[Finding]:
    """All that is found about a case."""
    first, second = (exact(build(values | layout["values"], folder)) for layout in layouts)
    write_corpora(first)
    laboratory = Laboratory(folder)
    try:
        reference = laboratory.alone(alone(first))
        run = laboratory.run(first, layouts[0]["ranks"], "first layout")
        found = list(compare_runs(run, reference))
        second.checkpoint.resume = str(run.checkpoint(SAVED))
        later = laboratory.run(second, layouts[1]["ranks"], "second layout")
        found.append(compare_after_resume("relay", later, reference))
        if any(map(may_be_rounding, found)):
            rounding = laboratory.rounding(alone(first))
            found = [judged(finding, rounding) for finding in found]
        yield from found
    except TrialFailed as error:
        yield Finding("runs end well", "broken", where=str(error))


def judged(finding: Finding, rounding: float) -> Finding:
    """A finding, beside the gap of one process to itself."""
    if not may_be_rounding(finding):
        return finding
    found = beside_rounding(finding, rounding, MOST_ROUNDING)
    if found.status == "broken" and found.bound == MOST_ROUNDING:
        where = f"one process differs from itself by {rounding:.2g}"
        return replace(found, status="open", where=where)
    return found


def draw(dice: random.Random, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A random model with all that is not layout, and two layouts that it can run on."""
    for _ in range(MANY_TRIES):
        values = {name: dice.choice(some) for name, some in VALUES.items()}
        if not mend(values, VALUES, {}, 1, folder):
            continue
        layouts = [layout for _ in range(2) if (layout := draw_layout(dice, values, folder))]
        if len(layouts) == 2:
            return values, layouts
    raise AssertionError("no model with two layouts")


def draw_layout(dice: random.Random, values: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """A random layout that the values can run on; None after many tries."""
    for _ in range(MANY_TRIES // 10):
        ranks = dice.choice(RANKS)
        chosen = {name: dice.choice(some) for name, some in LAYOUT.items()}
        levels = name_levels(dice.choice(LEVELS[ranks]))
        chosen["machine"] = {"levels": {name: {"size": size} for name, size in levels.items()}}
        if chosen["partition.strategy"] is None:
            known = [name for name in FREE if name in ("none", *levels)]
            depths = sorted(dice.randrange(len(known)) for _ in range(3))
            for name, depth in zip(("weights", "gradients", "optimizer"), depths, strict=True):
                chosen[f"partition.{name}"] = known[depth]
        if mend(chosen, LAYOUT, values, ranks, folder):
            return {"ranks": ranks, "values": chosen}
    return None


def name_levels(sizes: list[int]) -> dict[str, int]:
    """Sizes of levels, by their names."""
    names = ("pair", "node", "world")
    return dict(zip([*names[: len(sizes) - 1], "world"], sizes, strict=True))


def mend(
    chosen: dict[str, Any], kinds: Choices, others: dict[str, Any], ranks: int, folder: Path
) -> bool:
    """Set choices that are refused back to the first of their kind, one after another. Returns
    whether they can then run, with the `others`."""
    while True:
        try:
            check_layout(exact(build(others | chosen, folder)), ranks)
        except UserError as error:
            refused = str(error).partition(":")[0]
            key = next((name for name in kinds if refused.startswith(name)), "")
            if not key or chosen[key] == kinds[key][0]:
                return False
            chosen[key] = kinds[key][0]
        else:
            return True


def build(values: Mapping[str, Any], folder: Path) -> Config:
    """The configuration of dotted keys. Raises UserError."""
    common = {
        "run.directory": str(folder / "run"),
        "model.hidden": 32,
        "model.heads": 4,
        "model.ffn_hidden": 40,
        "model.sequence_length": 32,
        "model.vocab_multiple": 4,
        "model.init_std": 0.2,
        "tokenizer": "none",
        "data.train": [{"path": str(folder / f"corpus-{i}"), "weight": i + 1} for i in range(2)],
        "data.split": [0.8, 0.2],
        "train.steps": STEPS,
        "train.precision": "fp32",
        "optimizer.lr": 0.01,
        "optimizer.eps": 1e-3,
        "checkpoint.every": SAVED,
        "checkpoint.minutes": 0,
        "checkpoint.keep": 0,
        "evaluate.every": SAVED,
        "evaluate.batches": 1,
        "preflight.enabled": False,
        "log.callbacks": [RECORDER],
        "train.hang_seconds": 120,
    }
    return config_from_dict(nested(common | dict(values)), "compose")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of dotted keys, as a file has them."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


if __name__ == "__main__":
    sys.exit(main())
