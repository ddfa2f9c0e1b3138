"""`train`, `train --dry-run` and `plan` refuse a config with the same line."""

import os
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megafrontier.cli import main
from megafrontier.data.tokenizers import tokenizer
from megafrontier.launch import main as launch
from megafrontier.launch.context import join_machine
from megafrontier.launch.local import fork_ranks
from megafrontier.parallel.env import Identity
from megafrontier.parallel.hierarchy import Levels
from megafrontier.parallel.mesh import Mesh
from megafrontier.plan.refuse import check_layout
from megafrontier.planner import checks, command
from megafrontier.planner.search import CandidateLayout
from megafrontier.training.trainer import build_trainer
from tests import runs

LSP = "optimizer.groups=[{match: 'matrix:blocks.*', name: lsp}]"
SITES = "sites={{addresses: ['127.0.0.1:1', 'unknown.invalid:1'], secret: {}}}"
BAD_LAYOUTS = [
    ((LSP,), "optimizer.groups[0].name: lsp, need 1 rank, not 8, or another optimizer"),
    (("optimizer.groups=[{match: nothing, name: sgd}]",), "optimizer.groups[0].match: nothing, "),
    (("optimizer.groups=[{match: norm, name: muon}]",), "optimizer.groups[0]: muon, but "),
    (("optimizer.qk_clip=9", "model.attention={pattern: [delta], delta: {}}"),
     "optimizer.qk_clip: 9, need 0, or a block with full attention"),
    (("train.global_batch=12",), "train.global_batch: 12, need a multiple of 16"),
    (("train.global_batch=1000000000",), "train.global_batch: 1000000000, need at most 1048576"),
    (("parallel.tensor=3",), "parallel.tensor: 3, does not fill the levels "),
    (("parallel.pipeline=4",), "model.layers: 2, need at least 4, one block for each stage"),
    (("parallel.expert=2",), "parallel.expert: 2, need 1, or a model with experts (model.moe)"),
    (("partition.weights=world", "partition.gradients=node", "partition.optimizer=world"),
     "partition.weights: world reaches further than partition.gradients (node)"),
    (("partition.wires.reduce={rack: bf16}",), "partition.wires.reduce.rack: no such level, "),
]  # fmt: skip
BAD_FILES = [
    (("data.train=[{path: /nowhere/corpus}]",), "/nowhere/corpus.idx: "),
    (("data.valid=[{path: /nowhere/corpus, name: a}]",), "/nowhere/corpus.idx: "),
    (("model.vocab_size=200",), "model.vocab_size: 200, need at least 257 for tokenizer bytes"),
    (("tokenizer=/nowhere",), "tokenizer '/nowhere'"),
    (("log.wandb=offline",), "log.wandb: offline, needs a package: pip install megafrontier[wandb"),
    (("log.callbacks=[nowhere.Callback]",), "log.callbacks: nowhere.Callback, need "),
    ((SITES.format("/nowhere/secret"),), "sites.secret: /nowhere/secret: No such file "),
    ((SITES.format("{folder}/short"),), "/short: 4 bytes, need 16"),
]  # fmt: skip
BAD_RUNS = [
    (("checkpoint.resume=/nowhere/step-1",), "checkpoint.resume: /nowhere/step-1"),
    (("run.directory={folder}/corpus.bin/run",), "corpus.bin/run: Not a directory, need a folder"),
    (("run.directory={folder}/corpus.bin",), "corpus.bin: File exists, need a folder to write"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checks")
    runs.make_config_file(folder)
    (folder / "short").write_text("1234")
    return folder


@pytest.fixture
def refusal(folder, monkeypatch, capfd):
    """The line with which a command refuses overrides of a config on 8 ranks."""

    def start_nothing(*_):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "fork_ranks", start_nothing)
    monkeypatch.setattr(checks, "find_spec", lambda package: None)

    def run(name, *chosen):
        chosen = [override.replace("{folder}", str(folder)) for override in chosen]
        words = {
            "train": ["train", str(folder / "config.yaml"), "--nproc", "8"],
            "dry": ["train", str(folder / "config.yaml"), "--nproc", "8", "--dry-run"],
            "plan": ["plan", str(folder / "config.yaml"), "--nodes", "2"],
        }
        assert main([*words[name], *chosen]) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1
        return error

    return run


@pytest.mark.parametrize(("chosen", "reason"), BAD_LAYOUTS, ids=[line for _, line in BAD_LAYOUTS])
def test_a_layout_that_cannot_train_is_refused_alike(refusal, chosen, reason):
    lines = {refusal(name, *chosen) for name in ("train", "dry", "plan")}
    assert len(lines) == 1
    assert lines.pop().startswith(f"megafrontier: {reason}")


@pytest.mark.parametrize(
    ("chosen", "reason"), BAD_FILES + BAD_RUNS, ids=[line for _, line in BAD_FILES + BAD_RUNS]
)
def test_what_a_run_misses_on_this_machine_is_refused_alike(refusal, chosen, reason):
    line = refusal("train", *chosen)
    assert reason in line
    assert refusal("dry", *chosen) == line


@pytest.mark.parametrize(("chosen", "reason"), BAD_FILES, ids=[line for _, line in BAD_FILES])
def test_a_plan_warns_of_what_is_missing_on_this_machine(
    folder, monkeypatch, capfd, chosen, reason
):
    """`plan` comes before the data."""

    def search(config, ranks, report):
        step = SimpleNamespace(worst_gib=0.0)
        return [CandidateLayout((), config, check_layout(config, ranks), step)]

    monkeypatch.setattr(command, "search", search)
    monkeypatch.setattr(command, "table", lambda *_: "the table")
    monkeypatch.setattr(checks, "find_spec", lambda package: None)
    chosen = [override.replace("{folder}", str(folder)) for override in chosen]
    assert main(["plan", str(folder / "config.yaml"), "--nodes", "2", *chosen]) == 0
    shown = capfd.readouterr()
    assert shown.out == "the table\n"
    assert shown.err.startswith("megafrontier: warning: here ")
    assert reason in shown.err


@pytest.fixture
def looked(monkeypatch):
    """The files that were opened or looked for, once for each time."""
    names = []

    def noting(method):
        def note(path, *arguments, **options):
            names.append(path.name)
            return method(path, *arguments, **options)

        return note

    for method in ("open", "stat"):  # which the other methods call
        monkeypatch.setattr(Path, method, noting(getattr(Path, method)))
    return names


PARTS = {
    "a part for validation": ("data.split=[0.9,0.1]",),
    "packed": ("data.packing=best_fit", "data.split=[0.9,0.1]"),
    "named": ("data.valid=[{path: {folder}/corpus, name: a}, {path: {folder}/corpus, name: b}]",),
}


@pytest.mark.parametrize("chosen", PARTS.values(), ids=PARTS)
def test_a_rank_opens_each_corpus_once_and_one_rank_a_host_checks_it(folder, looked, chosen):
    """Three operations on metadata for a corpus and a rank, three more on one rank a host: with 100
    corpora and 75,264 ranks 25 million, instead of 90."""
    chosen = [override.replace("{folder}", str(folder)) for override in chosen]
    config = runs.load(folder / "config.yaml", "machine=laptop", "data.document_mask=true", *chosen)
    operations = []
    for local_rank in (0, 1):
        looked.clear()
        launch._check(config, Identity(local_rank, 2, local_rank, "torchrun", host="here"), 2)
        operations.append(sorted(name for name in looked if name.startswith("corpus")))
    assert operations == [["corpus.bin", "corpus.idx", "corpus.mask"], []]
    looked.clear()
    with runs.open_trainer(config, Mesh.single(Levels(("world",), (1,)), torch.device("cpu"))):
        operations = sorted(name for name in looked if name.startswith("corpus"))
    assert operations == ["corpus.bin", "corpus.idx", "corpus.mask"]


def test_only_rank_0_loads_the_tokenizer_to_train(folder, monkeypatch, tmp_path):
    config = runs.load(folder / "config.yaml", "machine=laptop")

    def body():
        rank = os.environ["MEGAFRONTIER_LOCAL"].partition("/")[0]
        load = tokenizer.load_tokenizer

        def load_and_note(spec):
            (tmp_path / rank).touch()
            return load(spec)

        tokenizer.cached_tokenizer.cache_clear()
        tokenizer.load_tokenizer = load_and_note
        with (
            join_machine(config) as (plan, mesh),
            closing(build_trainer(config, plan, mesh)) as trainer,
        ):
            assert trainer.loader.samples.vocab_size == 257
        return 0

    assert fork_ranks(2, body) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_dry_run_warns_of_a_missing_corpus_name_and_of_unknown_sites(folder, capfd):
    """Ready-made configs name no corpus. A run goes on without a site whose name is unknown."""
    (folder / "secret").write_text("a secret of 24 bytes ...")
    chosen = ["data.train=[]", SITES.format(folder / "secret"), "train.steps=2", "sites.every=1"]
    assert main(["train", str(folder / "config.yaml"), "--nproc", "4", "--dry-run", *chosen]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "warning: data.train: empty, need at least one corpus to train" in lines
    (name,) = (line for line in lines if "sites.addresses" in line)
    assert name.startswith("warning: sites.addresses: unknown.invalid:1: ")


@pytest.mark.parametrize("has_rates", [True, False])
def test_a_dry_run_tells_the_time_between_checkpoints_if_the_machine_has_rates(
    folder, capfd, has_rates
):
    chosen = ["checkpoint.every=9", "checkpoint.minutes=5", *["machine=frontier"] * has_rates]
    path = str(folder / "config.yaml")
    assert main(["train", path, "--nproc", "8", "--dry-run", *chosen]) == 0
    (line,) = (
        x
        for x in runs.unaligned(capfd.readouterr().out).splitlines()
        if x.startswith("checkpoints: ")
    )
    first, _, second = line.partition(" or 9 steps")
    assert first == "checkpoints: every 5 minutes (checkpoint.minutes)"
    assert second.endswith(" (checkpoint.every), whichever comes first")
    assert ("seconds" in second) == has_rates
