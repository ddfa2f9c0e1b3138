"""Write docs/support.md: which features go together, found by building one rank of each pair.

    python -m scripts.support_matrix

Two features at a time are put into the config of a small model on 16 ranks. The package checks the
config as before a run, and builds a rank of it on torch's meta device. What it refuses becomes a
row of the page.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from megafrontier.common.errors import UserError
from megafrontier.config import config_from_dict
from megafrontier.plan.assemble import build_model
from megafrontier.plan.refuse import check_layout
from megafrontier.planner.simulation.clock import Clock
from megafrontier.planner.simulation.dry_run import dry_mesh
from scripts.compose import nested

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"
RANKS = 16
BASE: dict[str, Any] = {
    "machine.levels": {"pair": {"size": 2}, "node": {"size": 4}, "world": {"size": 2}},
    "model.layers": 8,
    "model.hidden": 128,
    "model.heads": 8,
    "model.sequence_length": 256,
    "model.position": "rotary",
    "model.bias": False,
    "train.global_batch": 64,
    "train.micro_batch": 2,
    "data.train": [{"path": "corpus"}],
}
SITES = {"addresses": ["one:7001", "two:7001"], "secret": "secret.txt"}
DELTA = {"key_heads": 4, "value_heads": 8, "key_size": 16, "value_size": 16}
LATENT = {"query": 32, "key_value": 16, "rope_size": 8, "nope_size": 8, "value_size": 16}
MIXTURE = {"experts": 8, "active": 2, "ffn_hidden": 64}
MUON = {"match": "matrix:blocks.*", "name": "muon", "lr": 0.01}


HEAD = """\
<!-- Written by scripts/support_matrix.py from what the package refuses; do not edit. -->

# What runs with what

Every two of these features go together, but for the pairs of the last table. This was found by
building one rank of each pair. [Certificates](trust.md) and tests show that a layout computes what
one process computes. `optimizer.name: lsp` is for one rank alone
([fine-tuning](fine-tuning.md#a-model-whose-state-does-not-fit)).
"""
PAIRS = """\

## Pairs that are refused

`train`, `plan` and `certify` refuse them before a run starts, in the line of the last column.

| feature | not with | because |
|---|---|---|
"""


class Feature(NamedTuple):
    """A feature by the name that users know, and the keys that ask for it."""

    name: str
    values: Mapping[str, Any]

    def excludes(self, other: "Feature") -> bool:
        """Whether they give one key two values."""
        values = self.values
        return any(values.get(key, value) != value for key, value in other.values.items())


def by_key(key: str, **features: Any) -> Iterator[Feature]:
    """Features that are values of one key. Underscores of their names are spaces."""
    for name, value in features.items():
        yield Feature(name.replace("_", " "), {key: value})


FEATURES = {
    "Splits": [
        *by_key("parallel.tensor", tensor=2),
        *by_key("parallel.context", context=2),
        Feature("expert", {"parallel.expert": 2, "model.moe": MIXTURE}),
        *by_key("parallel.pipeline", pipeline=2),
        Feature(
            "zero-bubble pipeline", {"parallel.pipeline": 2, "parallel.schedule": "zero_bubble"}
        ),
    ],
    "States and links": [
        *(
            Feature(f"`{name}`", {"partition.strategy": name})
            for name in ("ddp", "zero3", "hpz", "topo")
        ),
        Feature("low-bit wires", {"partition.wires.preset": "low"}),
        *by_key("partition.overlap", no_overlap="none", full_overlap="full"),
        *by_key("partition.overlap_update", overlapped_update=True),
        *by_key("partition.offload.optimizer", offloaded_optimizer="cpu"),
        Feature(
            "no copy of weights", {"partition.strategy": "zero3", "partition.weights_copy": False}
        ),
        *by_key("sites", several_sites=SITES),
    ],
    "Training": [
        *by_key(
            "train.activation_checkpointing",
            recomputed_blocks="block",
            offloaded_activations="offload",
        ),
        *by_key("train.compile", compiled_blocks=True),
        Feature("CUDA graphs", {"train.cuda_graphs": True, "train.compile": True}),
        *by_key("train.precision", fp16="fp16"),
        *by_key("train.linear_precision", fp8="fp8"),
        *by_key("train.batch_warmup", growing_batch={"start": 32, "step_by": 32, "until": 10}),
        Feature("Muon", {"optimizer.groups": [MUON]}),
        Feature("QK-clip", {"optimizer.qk_clip": 100}),
        *by_key("optimizer.ema", EMA=0.9),
        *by_key("train.elastic", elastic=True),
    ],
    "Models and data": [
        *by_key("model.attention.window", windows=64),
        *by_key("model.attention.sinks", sinks=True),
        *by_key("model.attention.latent", latent_attention=LATENT),
        Feature(
            "delta attention",
            {"model.attention.pattern": ["delta", "full"], "model.attention.delta": DELTA},
        ),
        *by_key("model.moe", mixture=MIXTURE),
        *by_key("model.prediction", prediction={}),
        *by_key("model.tie_embeddings", tied_embeddings=True),
        *by_key("model.dropout", dropout=0.1),
        *by_key("model.scaling", muP={"name": "mup", "base_hidden": 64}),
        *by_key("data.document_mask", document_masks=True),
        Feature("packing", {"data.packing": "best_fit", "data.document_mask": True}),
    ],
}


ALL = [feature for features in FEATURES.values() for feature in features]


def refusal(*features: Feature) -> str | None:
    """What the package says of a config with these features. None if a rank of it can be built."""
    values = BASE | {key: value for feature in features for key, value in feature.values.items()}
    try:
        config = config_from_dict(nested(values), "support")
        plan = check_layout(config, RANKS)
        with Clock().running(), dry_mesh(plan) as mesh:
            build_model(config, plan, mesh, has_values=False)
    except UserError as error:
        return str(error)
    return None


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Every two features that one config can ask for."""
    return (pair for pair in combinations(ALL, 2) if not pair[0].excludes(pair[1]))


def table_of(features: Mapping[str, Iterable[Feature]]) -> Iterator[str]:
    """The rows of all features, with an example of the keys that ask for each."""
    yield "| | feature | asked for by |\n|---|---|---|"
    for group, some in features.items():
        for feature in some:
            keys = ", ".join(f"`{key}`" for key in feature.values)
            yield f"| {group} | {feature.name} | {keys} |"


def table_of_refusals() -> Iterator[str]:
    """The rows of all pairs that are refused. Those with one feature and one line share a row."""
    found: dict[tuple[str, str], list[str]] = {}
    for first, second in pairs():
        if line := refusal(first, second):
            found.setdefault((first.name, line), []).append(second.name)
    for (name, line), others in found.items():
        yield f"| {name} | {', '.join(others)} | `{line}` |"


if __name__ == "__main__":
    rows = [HEAD, *table_of(FEATURES), PAIRS.rstrip("\n"), *table_of_refusals()]
    PAGE.write_text("\n".join(rows) + "\n", encoding="utf-8")
