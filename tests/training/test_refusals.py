"""Bad input is refused in one line with code 2, most of it before any rank starts. Bad input that
one rank meets later ends all ranks."""

import os
from pathlib import Path

import pytest
import torch

from megafrontier.cli import main
from megafrontier.common.errors import FAILED, LOST, UserError
from megafrontier.config import load_config, load_machine
from megafrontier.data.sampling.loader import open_loader
from megafrontier.data.tokenizers.tokenizer import load_tokenizer
from megafrontier.launch import context, device
from megafrontier.launch import main as launch
from megafrontier.parallel.env import Identity
from megafrontier.planner import checks
from tests import runs
from tests.data.corpora import write_corpus


def test_more_local_ranks_than_devices_are_refused(monkeypatch):
    """NCCL would only say that a device is used twice."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="--nproc: 4, need at most 2, one a device"):
        device.choose_device(Identity(1, 4, 1, "local"), "any")


def test_a_local_rank_whose_device_is_full_says_so_in_one_line(config_file, monkeypatch, capfd):
    def set_device(device):
        raise torch.AcceleratorError(f"CUDA error: out of memory, of {device}\nCompile with …\n")

    def choose_device(identity, name):
        return torch.device("cuda", 1) if identity.rank == 1 else torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(context, "choose_device", choose_device)
    assert launch.train(runs.load(config_file, "machine=laptop"), 2) == FAILED
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("megafrontier: rank 1 on ")
    assert "CUDA error: out of memory, of cuda:1. Need a device without another" in line


def test_a_machine_of_cpus_leaves_accelerators_alone(monkeypatch):
    """The quickstart of the README, with eight local ranks, on a workstation with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    name = load_machine(load_config("configs/quickstart.yaml").machine).device.name
    assert device.choose_device(Identity(1, 8, 1, "local"), name) == torch.device("cpu")


def test_local_ranks_share_the_cores_unless_omp_num_threads_is_set(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    for is_set, ranks in ((True, 2), (False, 2), (False, 16)):
        if not is_set:
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        device.choose_device(Identity(0, ranks, 0, "local"), "cpu")
    assert chosen == [4, 1]


BAD = [
    (("parallel.pipeline=3",), "parallel.pipeline: 3, does not fill the levels (world 1 × node 2 × "
     "pair 2 ranks without other splits) one after the other, need one of 1, 2, 4"),
    (("parallel.context=node", "model.sequence_length=20"), "parallel.context: 4, cuts sequences "
     "into 8 chunks, which do not divide model.sequence_length (20), need one of 1, 2, 5, 10"),
    (("parallel.tensor=rack",), "parallel.tensor: no level 'rack' on this machine, need a whole"),
    (("parallel.tensor=0",), "parallel.tensor: 0, need at least 1"),
    (("parallel.tensor=2", "model.attention={pattern: [delta], delta: {key_heads: 3, value_heads: "
     "3}}"), "parallel.tensor: 2, does not divide model.attention.delta.key_heads (3), need one of "
     "1"),
    (("model.attention={pattern: [delta], delta: {}}", "model.dropout=0.1"),
     "model.dropout: 0.1, need 0 with delta attention"),
    (("parallel.tensor=null",), "parallel.tensor: null, need an integer or text"),
    (("parallel.expert=2",), "parallel.expert: 2, need 1, or a model with experts (model.moe)"),
    (("parallel.dispatch=flat", "model.moe={experts: 4}"), "parallel.dispatch: flat, need auto, or "
     "parallel.expert above 1"),
    (("parallel.token_pieces=2", "model.moe={experts: 4}"), "parallel.token_pieces: 2, need 1, or "
     "parallel.expert above 1 and partition.overlap: safe or full"),
    (("parallel.expert=4", "model.moe={experts: 6}"), "parallel.expert: 4, does not divide "
     "model.moe.experts (6), need one of 1, 2, 3, 6"),
    (("parallel.expert=8", "model.moe={experts: 8}"), "parallel.expert: 8, does not fill the "
     "levels (pair 2 × node 2 × world 1 ranks without other splits) one after the other, need one "
     "of 1, 2, 4"),
    (("parallel.schedule=zero_bubble",), "parallel.schedule: zero_bubble, need parallel.pipeline"),
    (("parallel.layers=[1,1]",), "parallel.layers: [1, 1], need parallel.pipeline"),
    (("parallel.pipeline=2", "parallel.layers=[1,2]"), "parallel.layers: [1, 2], need a sum of "
     "model.layers (2)"),
    (("parallel.pipeline=2", "parallel.layers=[2]"), "parallel.layers: [2], need 2 numbers"),
    (("parallel.pipeline=4",), "model.layers: 2, need at least 4, one block for each stage"),
    (("parallel.layers=[0]",), "parallel.layers[0]: 0, need at least 1"),
    (("machine.levels.pair.size=3", "machine.levels.node.size=1"), "machine.levels: pair 3 × "
     "node 1 × world ? cannot hold 4"),
    (("partition.weights=world", "partition.gradients=node", "partition.optimizer=world"),
     "partition.weights: world reaches further than partition.gradients (node)"),
    (("partition.weights_copy=false",), "partition.weights_copy: false, need true, or weights and "
     "optimizer sharded through the same levels, in fp32 over more than one rank"),
    (("partition.weights_copy=false", "partition.strategy=ddp"), "partition.weights_copy: false"),
    (("partition.wires.activations=auto",),
     "partition.wires.activations: auto, need parallel.pipeline"),
    (("parallel.pipeline=2", "partition.wires.activations=auto"), "partition.wires.activations: "
     "auto, need machine.levels.node.gigabytes_per_second; `megafrontier probe --write FILE`"),
    (("partition.wires.activations=int8",), "partition.wires.activations: int8, need keys and "
     "values, as in {KEY: VALUE} or one of auto"),
    (("partition.wires.reduce={node: fp9}",), "partition.wires.reduce.node: fp9, need one of"),
    (("partition.strategy=mics", "partition.error_feedback=true"),
     "partition.error_feedback: true, but no level within partition.optimizer"),
    (("train.global_batch=6",), "train.global_batch: 6, need a multiple of 8"),
    (("train.global_batch=1000000000",), "train.global_batch: 1000000000, need at most 524288"),
    (("model.vocab_size=200",), "model.vocab_size: 200, need at least 257 for tokenizer bytes"),
    (("data.train=[{path: /nowhere/corpus}]",), "/nowhere/corpus.idx: "),
    (("data.split=[0,1]",), "data.split: [0.0, 1.0], need two parts"),
    (("tokenizer=/nowhere",), "tokenizer '/nowhere'"),
    (("log.wandb=offline",), "log.wandb: offline, needs a package: pip install megafrontier[wandb"),
    (("optimizer.fused=apex",), "optimizer.fused: apex, but apex is not installed"),
    (("checkpoint.resume=/nowhere/step-1",), "checkpoint.resume: /nowhere/step-1"),
    (("run.directory={folder}/corpus.bin/run",), "corpus.bin/run: Not a directory, need a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("chosen", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_bad_input_is_refused_in_one_line_before_any_rank_starts(
    config_file, tmp_path, monkeypatch, capfd, chosen, reason
):
    def fork_nothing(*_):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "fork_ranks", fork_nothing)
    monkeypatch.setattr(checks, "find_spec", lambda package: None)
    chosen = [override.replace("{folder}", str(tmp_path)) for override in chosen]
    assert main(["train", str(config_file), "--nproc", "4", *chosen]) == 2
    error = capfd.readouterr().err
    assert error.startswith("megafrontier: ")
    assert error.count("\n") == 1
    assert reason in error


def make_padded_tokenizer(folder):
    """61 words, the first of which ends texts, and an added `<pad>`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).encode("w60<pad>") == [60, 61]


def test_special_tokens_that_only_the_tokenizer_has_are_refused_in_data(config_file, tmp_path):
    """Many models on the hub have such. Their weights fit no larger `model.vocab_size`."""
    make_padded_tokenizer(tmp_path / "tok")
    chosen = (f"tokenizer={tmp_path}/tok", *runs.ONE, "train.stop_at=1", "model.vocab_size=61")
    assert launch.train(runs.load(config_file, *chosen), 1) == 0
    with pytest.raises(UserError, match=r"vocab_size: 60, need at least 61 for tokenizer"):
        launch.train(runs.load(config_file, *chosen, "model.vocab_size=60"), 1)
    write_corpus(tmp_path / "corpus", [[[60, 61] * 200]])
    with pytest.raises(UserError, match="token id 61, need 0 to 60, the ids of `tokenizer` that"):
        launch.train(runs.load(config_file, *chosen), 1)


def spoil(prefix: Path, sequence: int, length: int = 16) -> None:
    """Put an id that no vocabulary has into one window of a corpus."""
    data = bytearray(Path(f"{prefix}.bin").read_bytes())
    at = (sequence * length + 3) * 2
    data[at : at + 2] = (60000).to_bytes(2, "little")
    Path(f"{prefix}.bin").write_bytes(data)


def test_an_id_beyond_the_vocabulary_on_one_rank_is_one_line_and_ends_all(
    config_file, tmp_path, capfd
):
    config = runs.load(config_file, "machine=laptop")
    samples = open_loader(config, "train", 0, 1).samples
    window = samples.locate(2 * 16 + 13, 1)[0][1]  # the last rank's part of the third step
    spoil(tmp_path / "corpus", window)
    assert runs.train(config, 2) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"megafrontier: rank 1: {tmp_path}/corpus.bin: byte ")
    assert "token id 60000, need 0 to 256" in error
    assert error.count("\n") == 1
    assert len(runs.losses(runs.metrics(tmp_path / "run"))) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_metrics_and_log_on_a_full_disk_are_one_warning_and_the_run_goes_on(
    config_file, tmp_path, monkeypatch, capfd
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").symlink_to("/dev/full")
    whole = Path.open

    def open_full(path, *mode, **options):
        # A link would not do: older lines are read first, and /dev/full has no end.
        is_metrics = path.suffix == ".jsonl" and mode == ("a",)
        return whole(Path("/dev/full") if is_metrics else path, *mode, **options)

    monkeypatch.setattr(Path, "open", open_full)
    config = runs.load(config_file, *runs.ONE, "train.steps=2", "log.every=1")
    assert runs.train(config, 2) == 0
    shown = capfd.readouterr()
    warning = "warning: metrics are not written to metrics.jsonl: No space left on device"
    assert shown.out.count(warning) == 1
    assert "step 2/2" in shown.out
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").is_dir()
    assert shown.err == ""


@pytest.mark.parametrize(
    ("number", "said", "code"), [(5, "Input/output error", LOST), (13, "Permission denied", 2)]
)
def test_storage_that_fails_at_the_start_is_not_bad_input(
    config_file, monkeypatch, capfd, number, said, code
):
    """A job in the queue would not be started again for storage that is away for a minute."""
    whole = Path.open

    def fail(path, *mode, **options):
        if path.name == "log.txt":
            raise OSError(number, said, str(path))
        return whole(path, *mode, **options)

    monkeypatch.setattr(Path, "open", fail)
    assert main(["train", str(config_file), "--nproc", "4"]) == code
    assert capfd.readouterr().err.endswith(f"/run/log.txt: {said}, need a folder to write\n")
