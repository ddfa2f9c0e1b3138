"""Evaluation of a checkpoint: loss, perplexity, bits per byte, and the text that they count."""

import math
import os

import pytest
import torch

from megafrontier.cli import main
from megafrontier.commands.checkpoints import load_model, saved_config
from megafrontier.commands.evaluate import text_bytes
from megafrontier.common.checkpoints import newest
from megafrontier.config import Config, config_to_dict
from megafrontier.data.sampling.samples import Batch
from megafrontier.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from megafrontier.model.loss import IGNORE_INDEX
from tests.checkpoint.helpers import save_all
from tests.commands.helpers import numbers, run_command, whole_model_loss
from tests.data.corpora import write_corpus


def batch_of(rows, before):
    """Rows of targets, each with the token before it."""
    targets = torch.tensor(rows)
    tokens = torch.cat([torch.tensor(before)[:, None], targets[:, :-1]], 1)
    return Batch(tokens, targets, None, 0)


def test_a_character_that_two_rows_share_counts_its_own_bytes():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("ßä€x")
    assert len(ids) == 8
    rows = [
        [*ids[:3], tokenizer.eod],
        [*ids[3:6], IGNORE_INDEX],
        [*ids[6:], IGNORE_INDEX, IGNORE_INDEX],
    ]
    batch = batch_of(rows, [tokenizer.eod, ids[2], ids[5]])
    # Where € is cut, the two bytes before the cut cannot be told from one.
    assert text_bytes(tokenizer, batch) == 7


def test_a_space_at_a_rows_beginning_counts_though_the_tokenizer_leaves_it_out_there():
    class Llamas(ByteTokenizer):
        def decode(self, ids):
            return super().decode(ids).removeprefix(" ")

    tokenizer = Llamas()
    ids = tokenizer.encode(" ab cd ef")  # the first space is the tokenizer's own
    batch = batch_of([ids[:3], ids[3:6], ids[6:]], [tokenizer.eod, ids[2], ids[5]])
    assert text_bytes(tokenizer, batch) == len("ab cd ef")


def test_evaluate_tells_the_loss_perplexity_and_bits_per_byte_of_one_whole_model(life, capfd):
    path = newest(life / "run")
    model = load_model(path, saved_config(path), torch.device("cpu"))
    model.eval()

    def model_loss(batch):
        logits = model(batch.tokens)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )

    nats, batch, config = whole_model_loss(life, model_loss)
    tokenizer = load_tokenizer(config.tokenizer)
    expected_bytes = sum(len(tokenizer.decode(row.tolist()).encode()) for row in batch.targets)
    lines = [run_command(capfd, "evaluate", life / "run", *more) for more in ((), ("--nproc", 4))]
    for line in lines:
        loss, perplexity, bits, tokens, text_bytes = numbers(line)
        assert tokens == batch.targets.numel()
        assert loss == pytest.approx(nats / tokens, abs=1e-4)
        assert perplexity == pytest.approx(math.exp(nats / tokens), abs=0.01)
        assert text_bytes == expected_bytes
        assert bits == pytest.approx(nats / math.log(2) / expected_bytes, abs=1e-4)
    assert lines[0] == lines[1]


def test_evaluate_takes_overrides_and_a_config(life, capfd):
    chosen = ("model.vocab_size=300", "data.split=[0.8,0.2]", "evaluate.batches=1")
    line = run_command(capfd, "evaluate", life / "config.yaml", *chosen)
    assert numbers(line)[3] == 16 * 16


def test_local_ranks_evaluate_a_run_whose_splits_name_levels_of_another_machine(
    life, capfd, tmp_path
):
    path = tmp_path / "split.yaml"
    path.write_text(f"defaults: {life}/config.yaml\nparallel: {{tensor: pair}}")
    chosen = ("model.vocab_size=300", "evaluate.batches=1")
    assert numbers(run_command(capfd, "evaluate", path, *chosen))[3] == 16 * 16


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tokenizer=/nowhere", "tokenizer '/nowhere'"),
        ("data.train=[]", "data.valid: empty, need a corpus to evaluate on"),
        ("machine.device.memory_gib=1", "machine.device.memory_gib: not used by evaluate"),
        ("parallel.tensor=2", "parallel.tensor: 2"),
        ("optimizer.lr=7", "optimizer.lr: not used by evaluate"),
    ],
)
def test_evaluate_ignores_no_override(life, capfd, override, said):
    assert main(["evaluate", str(life / "run"), override]) == 2
    assert said in capfd.readouterr().err


def test_a_run_is_evaluated_with_its_splits_on_any_number_of_ranks(life, capfd, tmp_path):
    """Where they fit; and its micro-batch is made smaller if there are more data-parallel ranks."""
    path = tmp_path / "split.yaml"
    path.write_text(
        f"defaults: {life}/config.yaml\nparallel: {{tensor: 2, context: 2}}\n"
        "train: {global_batch: 4, micro_batch: 4}"
    )
    chosen = ("model.vocab_size=300", "evaluate.batches=1")
    lines = []
    for ranks, said in (
        (4, "layout: the splits of the run, levels pair × node × world\n"),
        (2, "layout: no splits, levels world, because its own do not fit 2 ranks\n"),
    ):
        shown = run_command(capfd, "evaluate", path, *chosen, "--nproc", ranks)
        assert said in shown
        lines.append(numbers(shown))
    assert lines[0] == pytest.approx(lines[1], abs=1e-3)
    asked = ("parallel.tensor=2", "parallel.context=1", "--nproc", 2)
    assert numbers(run_command(capfd, "evaluate", path, *chosen, *asked)) == pytest.approx(
        lines[0], abs=1e-3
    )


def test_a_tokenizer_with_files_that_are_not_the_checkpoints_is_refused(tmp_path, capsys):
    """They may be a pipe, which would block."""

    def attach(folder):
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "tokenizer.json").write_text("{}")

    path = save_all(tmp_path, attach=attach, config=config_to_dict(Config()))
    os.mkfifo(path / "tokenizer" / "tokenizer_config.json")
    assert main(["evaluate", str(path)]) == 2
    said = capsys.readouterr().err
    assert "tokenizer_config.json: not one of the checkpoint's files" in said
    assert said.count("\n") == 1


def test_an_average_that_the_run_did_not_keep_is_refused(life, capfd):
    assert main(["evaluate", str(life / "run"), "--weights", "ema"]) == 2
    said = capfd.readouterr().err
    assert "--weights: ema, but" in said
    assert "has none, need a run with optimizer.ema" in said


def test_evaluate_tells_of_other_rotary_frequencies_than_the_trainings(life, capfd):
    """As a config has that lacks what the training was given on the command line."""
    words = ("evaluate", life / "config.yaml", "model.vocab_size=300", "evaluate.batches=1")
    assert "rotary" not in run_command(capfd, *words)
    shown = run_command(capfd, *words, "model.rotary_base=500", "--nproc", 2)
    assert shown.count("warning: model.rotary_base: 500.0, was 10000.0") == 1


def test_the_end_of_a_document_is_no_text_to_evaluate(life, capfd, tmp_path):
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    named = Tokenizer(models.BPE({"<eos>": 0, "a": 1}, []))
    named.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=named, eos_token="<eos>").save_pretrained(tmp_path)
    write_corpus(tmp_path / "valid", [[[1] * 7 + [0]]] * 33)
    line = run_command(
        capfd, "evaluate", life / "config.yaml", "model.vocab_size=300", "evaluate.batches=1",
        f"tokenizer={tmp_path}", f"data.valid=[{{path: {tmp_path}/valid}}]",
    )  # fmt: skip
    assert numbers(line)[3:] == [256, 256 * 7 / 8]
