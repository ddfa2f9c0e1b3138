"""What the commands do with a trained model, as a user types them: evaluate, generate, export and
import."""

import json
import math
import re
import shutil
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch

from megafrontier.checkpoint.folder import newest
from megafrontier.cli import main
from megafrontier.commands import checkpoints, convert
from megafrontier.commands import evaluate as evaluate_module
from megafrontier.commands import generate as generate_module
from megafrontier.common.errors import FAILED
from megafrontier.config import load_config
from megafrontier.data.text.prepare import prepare
from megafrontier.data.tokenizers.tokenizer import ByteTokenizer
from tests import runs
from tests.data.corpora import write_corpus

TEXT = "Der Fluß ist breit, 3 € sind viel; a stitch in time saves nine.\n" * 60
CONVERT, GENERATE = "megafrontier.commands.convert.", "megafrontier.commands.generate."
CHECKPOINTS = "megafrontier.commands.checkpoints."
EVALUATE = "megafrontier.commands.evaluate."


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """A config whose run has been trained on real text with a real tokenizer."""
    folder = tmp_path_factory.mktemp("life")
    (folder / "text.txt").write_text(TEXT)
    main(["tokenizer", str(folder / "text.txt"), "--vocab-size", "300", "--out",
          str(folder / "tokenizer")])  # fmt: skip
    prepare([str(folder / "text.txt")], str(folder / "tokenizer"), str(folder / "text"), 1)
    path = folder / "config.yaml"
    runs.make_config_file(folder)
    text = path.read_text().replace(f"{folder}/corpus", f"{folder}/text")
    path.write_text(text.replace("tokenizer: bytes", f"tokenizer: {folder}/tokenizer"))
    chosen = ("model.vocab_size=300", "train.steps=30", "train.micro_batch=4",
              "data.split=[0.8,0.2]", "evaluate.batches=2")  # fmt: skip
    runs.run(path, 4, *chosen)
    return folder


def run_command(capfd, *words):
    assert main([str(word) for word in words]) == 0
    return capfd.readouterr().out


def numbers(line):
    """(loss, perplexity, bits per byte, tokens, bytes) of a line of `evaluate`."""
    found = re.search(
        r"loss ([\d.]+)  perplexity ([\d.]+)  bits per byte ([\d.]+)  \((\d+) tokens, (\d+) bytes",
        line,
    )
    assert found, line
    return [float(number) for number in found.groups()]


@torch.no_grad()
def whole_model_loss(life, model_loss):
    """Nats, tokens and text of the same validation samples, by another road."""
    from megafrontier.checkpoint.folder import newest
    from megafrontier.commands.checkpoints import saved_config
    from megafrontier.training.trainer import open_loader

    config = saved_config(newest(life / "run"))
    samples = open_loader(config, "valid", 0, 1).samples
    batch = samples.batch(0, 2 * config.train.global_batch)
    return model_loss(batch).item(), batch, config


def test_evaluate_tells_the_loss_perplexity_and_bits_per_byte_of_one_whole_model(life, capfd):
    from megafrontier.checkpoint.folder import newest
    from megafrontier.commands.checkpoints import load_model, saved_config
    from megafrontier.data.tokenizers.tokenizer import load_tokenizer

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


def test_evaluate_agrees_with_the_runs_own_last_evaluation(life, capfd):
    line = run_command(capfd, "evaluate", life / "run")
    assert numbers(line)[0] == pytest.approx(
        runs.valid_losses(runs.metrics(life / "run"))[-1], abs=1e-4
    )


def test_evaluate_takes_overrides_and_a_config(life, capfd):
    chosen = ("model.vocab_size=300", "data.split=[0.8,0.2]", "evaluate.batches=1")
    line = run_command(capfd, "evaluate", life / "config.yaml", *chosen)
    assert numbers(line)[3] == 16 * 16


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tokenizer=/nowhere", "tokenizer '/nowhere'"),
        ("data.train=[]", "data.valid: empty, need a corpus to evaluate on"),
        ("machine=frontier", "machine: not used by evaluate"),
        ("machine.device.memory_gib=1", "machine.device.memory_gib: not used by evaluate"),
        ("partition.strategy=topo", "partition.strategy: not used by evaluate"),
        ("train.compile=true", "train.compile: not used by evaluate"),
        ("optimizer.lr=7", "optimizer.lr: not used by evaluate"),
        ("run.name=other", "run.name: not used by evaluate"),
    ],
)
def test_evaluate_ignores_no_override(life, capfd, override, said):
    assert main(["evaluate", str(life / "run"), override]) == 2
    assert said in capfd.readouterr().err


def test_evaluate_tells_of_other_rotary_frequencies_than_the_trainings(life, capfd):
    """As a config has that lacks what the training was given on the command line."""
    words = ("evaluate", life / "config.yaml", "model.vocab_size=300", "evaluate.batches=1")
    assert "rotary" not in run_command(capfd, *words)
    told = run_command(capfd, *words, "model.rotary_base=500", "--nproc", 2)
    assert told.count("warning: model.rotary_base: 500.0, was 10000.0") == 1


def test_a_checkpoint_that_one_rank_cannot_read_is_named_in_one_line(life, capfd, tmp_path):
    """Whichever rank it is, and however it would be noticed: by the length or by the contents."""
    source = sorted((life / "run" / "checkpoints").glob("step-*"))[-1]

    def overwrite(data):
        header = 8 + int.from_bytes(data[:8], "little")
        return data[:header] + bytes(len(data) - header)

    for number, damage in enumerate((lambda data: data[:-9], overwrite)):
        copy = tmp_path / str(number) / source.name
        shutil.copytree(source, copy)
        last = max(copy.glob("pieces/*/*"))
        assert last.name != "00000000.safetensors"
        last.write_bytes(damage(last.read_bytes()))
        assert main(["evaluate", str(copy), "--nproc", "4"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert str(last) in line


def test_evaluate_needs_no_optimizer(life, capfd, tmp_path):
    """apex is where the run was trained."""
    config = tmp_path / "apex.yaml"
    config.write_text(f"defaults: {life}/run/config.yaml\noptimizer: {{fused: apex}}\n")
    assert numbers(run_command(capfd, "evaluate", config))[0] > 0


def test_evaluate_does_not_read_the_training_data(life, capfd):
    chosen = ("data.train=[{path: /nowhere}]", f"data.valid=[{{path: {life}/text}}]")
    assert numbers(run_command(capfd, "evaluate", life / "run", *chosen))[0] > 0


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


def test_generated_text_keeps_its_space_behind_the_prompt(life, capfd, monkeypatch):
    from megafrontier.data.tokenizers.tokenizer import SentencePieceTokenizer

    decode = SentencePieceTokenizer.decode
    monkeypatch.setattr(  # as Llama's does
        SentencePieceTokenizer, "decode", lambda *a: decode(*a).removeprefix(" ")
    )
    tokens = SentencePieceTokenizer(life / "tokenizer" / "tokenizer.model").encode(" ist breit")
    monkeypatch.setattr(generate_module, "generate", lambda *_, **__: iter(tokens))
    text = run_command(capfd, "generate", life / "run", "--prompt", "Der Fluß")
    assert text.rstrip("\n") == "Der Fluß ist breit"


def test_a_text_that_ends_because_the_context_is_full_says_so(life, capfd):
    words = ["generate", str(life / "run"), "--prompt", "Der Fluß", "--temperature", "0"]
    length = load_config(life / "config.yaml").model.sequence_length
    full = f"megafrontier: ended at the {length} tokens of model.sequence_length\n"
    for count, told in ((3, ""), (length, full)):
        assert main([*words, "--max-new-tokens", str(count)]) == 0
        assert capfd.readouterr().err == told


def test_a_prompt_that_is_no_text_is_refused_in_one_line(life, capfd):
    """The shell's bytes, as Python hands them on."""
    assert main(["generate", str(life / "run"), "--prompt", "Fl\udcfc"]) == 2
    assert capfd.readouterr().err == "megafrontier: --prompt: not valid UTF-8\n"


def test_an_empty_prompt_is_refused_where_no_model_learns_how_a_document_begins(
    life, capfd, monkeypatch
):
    saved = generate_module.saved_config

    def masked(checkpoint):
        config = saved(checkpoint)
        config.data.document_mask = True
        return config

    words = ["generate", str(life / "run"), "--prompt", "", "--max-new-tokens", "1"]
    assert main(words) == 0
    capfd.readouterr()
    monkeypatch.setattr(generate_module, "saved_config", masked)
    assert main(words) == 2
    assert capfd.readouterr().err.startswith("megafrontier: --prompt: empty, but with data.")


def test_generate_keeps_to_the_processors_where_the_machine_says_so(life, capfd, monkeypatch):
    """As train and evaluate do, whatever else there is."""
    load_model, saved_config = generate_module.load_model, generate_module.saved_config
    devices = []

    def load(path, config, device):
        devices.append(device.type)
        return load_model(path, config, torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(generate_module, "load_model", load)
    words = ("generate", life / "run", "--prompt", "D", "--max-new-tokens", 1)
    for override in ("machine.device.name=any", "machine.device.name=cpu"):
        monkeypatch.setattr(
            generate_module, "saved_config", lambda path, o=override: saved_config(path, [o])
        )
        run_command(capfd, *words)
    monkeypatch.setattr(generate_module, "saved_config", saved_config)
    run_command(capfd, *words, "--device", "cpu")
    assert devices == ["cuda", "cpu", "cpu"]


@pytest.mark.parametrize(
    ("words", "patched", "need"),
    [
        (
            ["generate", "--prompt", "D"],
            GENERATE + "load_model",
            "--device cpu, or a shorter text",
        ),
        (
            ["evaluate"],
            EVALUATE + "build_model",
            "a smaller train.micro_batch (4), or more ranks",
        ),
    ],
)
def test_a_device_without_memory_for_a_finished_model_is_one_line(
    life, capfd, monkeypatch, words, patched, need
):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore.")

    monkeypatch.setattr(patched, full)
    assert main([words[0], str(life / "run"), *words[1:]]) == FAILED
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f": CUDA out of memory. Tried 2 GiB. Need {need}")


def test_an_import_that_cannot_be_is_refused_before_its_weights_are_read(
    capfd, monkeypatch, tmp_path
):
    """Neither is the tokenizer blamed for a folder that is not there."""
    monkeypatch.setattr(convert, "import_model", lambda _: pytest.fail("weights are read"))
    monkeypatch.setattr(convert, "cached_tokenizer", lambda _: pytest.fail("tokenizer is read"))

    def refused(out):
        assert main(["import", str(tmp_path), "--out", str(out)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    assert refused(tmp_path / "out").startswith(f"megafrontier: {tmp_path}/config.json: ")
    monkeypatch.undo()
    monkeypatch.setattr(convert, "import_model", lambda _: pytest.fail("weights are read"))
    monkeypatch.setattr(convert, "described_model", lambda _: None)
    assert refused(tmp_path / "out").startswith(f"megafrontier: tokenizer '{tmp_path}': no ")
    monkeypatch.setattr(convert, "cached_tokenizer", lambda _: None)
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file" / "out") == (
        f"megafrontier: --out {tmp_path}/file/out: {tmp_path}/file cannot be written into, need "
        "another folder"
    )


def test_a_model_imported_without_a_tokenizer_trains_and_evaluates_and_refuses_prompts(
    life, capfd, tmp_path
):
    """On a corpus whose ids fit: what its folder lacks, `--tokenizer` gives or does without."""
    run_command(capfd, "export", life / "run", "--out", tmp_path / "hf")
    for path in (tmp_path / "hf").glob("*token*"):
        path.unlink()

    def refused(*words):
        assert main([str(word) for word in words]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    out = ["--out", tmp_path / "bare"]
    line = refused("import", tmp_path / "hf", *out)
    assert line.startswith(f"megafrontier: tokenizer '{tmp_path}/hf': no tokenizer in this folder")
    assert line.endswith("; or --tokenizer PATH or --tokenizer none")
    general = Path(__file__).parents[2] / "tokenizers" / "general-16k.model"
    line = refused("import", tmp_path / "hf", *out, "--tokenizer", general)
    assert line.startswith("megafrontier: model.vocab_size: 300, need at least 16384 for tokenizer")
    run_command(capfd, "import", tmp_path / "hf", *out, "--tokenizer", "none")
    given = ["--out", tmp_path / "given", "--tokenizer", life / "tokenizer"]
    run_command(capfd, "import", tmp_path / "hf", *given)

    corpus = [f"data.valid=[{{path: {life}/text}}]", "evaluate.batches=2"]
    found = run_command(capfd, "evaluate", tmp_path / "given", *corpus)
    shown = run_command(capfd, "evaluate", tmp_path / "bare", *corpus)
    assert shown.partition(": ")[2].split()[:4] == found.partition(": ")[2].split()[:4]
    assert "bits per byte" not in shown
    need = "megafrontier: tokenizer: none, need one to read and write text"
    assert refused("generate", tmp_path / "bare", "--prompt", "Der") == need
    assert refused("prepare", life / "text.txt", "--tokenizer", "none", "--out", "x") == need
    assert run_command(capfd, "generate", tmp_path / "given", "--prompt", "Der").startswith("Der")

    lines = runs.run(
        life / "config.yaml", 1, f"checkpoint.resume={tmp_path}/bare", "machine=laptop",
        "model.vocab_size=300", "model.vocab_multiple=128", "train.steps=2", "tokenizer=none",
        f"run.directory={tmp_path}/on",
    )  # fmt: skip
    assert len(runs.losses(lines)) == 2
    run_command(capfd, "export", tmp_path / "on", "--out", tmp_path / "again")
    assert not list((tmp_path / "again").glob("*token*"))


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--temperature", "-1", "--temperature: -1.0, need 0 or more"),
        ("--max-new-tokens", "-1", "--max-new-tokens: -1, need 0 or more"),
        ("--prompt", "D" * 999, "--prompt: 999 tokens, need at most "),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_the_model_is_loaded(
    life, capfd, monkeypatch, option, value, problem
):
    monkeypatch.setattr(generate_module, "load_model", lambda *_: pytest.fail("weights are read"))
    monkeypatch.setattr(generate_module, "load_tokenizer", lambda _: ByteTokenizer())
    assert main(["generate", str(life / "run"), "--prompt", "D", option, value]) == 2
    said = capfd.readouterr()
    assert said.err.startswith(f"megafrontier: {problem}")
    assert said.out == ""


def test_a_trace_has_a_row_a_level_and_costs_no_run_its_end(life, capfd, tmp_path):
    words = ["train", life / "config.yaml", "--nproc", 4, "model.vocab_size=300", "train.steps=2"]
    run_command(capfd, *words, "--trace", f"run.directory={tmp_path}/run")
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert rows == ["waiting", "pair", "node", "world"]
    assert {event["name"].split()[0] for event in events if event["ph"] == "X"} >= {
        "gather", "reduce", "finish", "publish"
    }  # fmt: skip
    (tmp_path / "other" / "trace.json").mkdir(parents=True)
    shown = run_command(capfd, *words, "--trace", f"run.directory={tmp_path}/other")
    assert f"warning: {tmp_path}/other/trace.json is not written: Is a directory" in shown


def test_generated_tokens_are_the_tokenizers(life, capfd, monkeypatch):

    found = {}

    def generate(*_, **sampling):
        found.update(sampling)
        return iter(())

    monkeypatch.setattr(generate_module, "generate", generate)
    run_command(capfd, "generate", life / "run", "--prompt", "Der Fluß")
    assert found["vocab_size"] == 300


@pytest.mark.parametrize("command", ["generate", "evaluate", "export"])
def test_a_damaged_tokenizer_in_a_checkpoint_is_not_used(life, tmp_path, capfd, command):
    """It may still load, and give wrong text."""
    copy = tmp_path / "step-00000030"
    shutil.copytree(life / "run" / "checkpoints" / copy.name, copy)
    model = next(path for path in sorted((copy / "tokenizer").iterdir()) if path.is_file())
    model.write_bytes(model.read_bytes()[:-1] + b"?")
    words = {"generate": ["--prompt", "x"], "export": ["--out", str(tmp_path / "out")]}
    assert main([command, str(copy), *words.get(command, [])]) == 2
    assert f"{model}: checksum does not match" in capfd.readouterr().err


@pytest.fixture
def training(life, tmp_path):
    """A run as `life`'s, with two checkpoints more, and what a training does when it has saved."""
    run = tmp_path / "run"
    shutil.copytree(life / "run", run)
    kept = run / "checkpoints" / "step-00000030"
    for step in ("31", "32"):
        shutil.copytree(kept, kept.with_name(f"step-000000{step}"))

    def prune(path):
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)

    return SimpleNamespace(path=run, prune=prune, kept=kept)


@pytest.mark.parametrize(
    ("command", "reader"),
    [
        (["checkpoint", "show"], "megafrontier.checkpoint.commands.read_manifest"),
        (["generate", "--prompt", "x", "--max-new-tokens", "1"], GENERATE + "saved_config"),
        (["generate", "--prompt", "x", "--max-new-tokens", "1"], CHECKPOINTS + "open_checkpoint"),
        (["export"], CONVERT + "saved_config"),
        (["export"], CONVERT + "Checkpoint.tensors"),
        (["evaluate"], EVALUATE + "saved_config"),
    ],
)
def test_what_the_training_prunes_meanwhile_is_not_needed(
    training, capfd, monkeypatch, tmp_path, command, reader
):
    read = resolve_name(reader)

    def pruned_before(source, *args, **named):
        training.prune(source if isinstance(source, Path) else source.path)
        return read(source, *args, **named)

    monkeypatch.setattr(reader, pruned_before)
    out = ["--out", tmp_path / "out"] if command == ["export"] else []
    run_command(capfd, *command, training.path, *out)
    assert [path.name for path in training.kept.parent.iterdir()] == [training.kept.name]


def test_all_ranks_of_an_evaluation_take_the_same_next_newest(training, capfd, monkeypatch):
    load_checkpoint = evaluate_module.load_checkpoint

    def pruned_before(path, *, load, world):
        if world.rank == 1:
            training.prune(path)
        world.barrier()
        return load_checkpoint(path, load, world)

    monkeypatch.setattr(evaluate_module, "load_checkpoint", pruned_before)
    line = run_command(capfd, "evaluate", training.path, "--nproc", "2").splitlines()[-1]
    assert line.startswith(f"{training.kept}: loss ")
    expected = runs.valid_losses(runs.metrics(training.path))[-1]
    assert numbers(line)[0] == pytest.approx(expected, abs=1e-4)


def test_what_is_exported_is_read_in_few_passes(life, tmp_path, monkeypatch):
    """Each may open every file: one parameter lies in as many as its share of the unit."""
    whole = tmp_path / "whole"
    convert.export_command(life / "run", whole, "fp32")
    reads = []
    tensors = convert.Checkpoint.tensors

    def counted(checkpoint, state, names):
        reads.append(len(names))
        return tensors(checkpoint, state, names)

    monkeypatch.setattr(convert.Checkpoint, "tensors", counted)
    for size, most in ((2**40, 1), (20_000, 12), (1, 1000)):
        monkeypatch.setattr(convert, "READ_BYTES", size)
        reads.clear()
        convert.export_command(life / "run", tmp_path / str(size), "fp32")
        assert 1 <= len(reads) <= most
        name = "model.safetensors"
        assert (tmp_path / str(size) / name).read_bytes() == (whole / name).read_bytes()
    assert set(reads) == {1}


def test_greedy_text_is_the_same_each_time_and_a_seed_repeats_the_rest(life, capfd):
    def text(*more):
        words = ("generate", life / "run", "--prompt", "Der Fl", "--max-new-tokens", 8, *more)
        return run_command(capfd, *words)

    greedy = text("--temperature", 0)
    assert greedy == text("--temperature", 0)
    assert greedy.startswith("Der Fl")
    assert len(greedy) > len("Der Fl") + 2
    assert text("--seed", 3) == text("--seed", 3)
    assert text("--seed", 3, "--top-k", 1) == greedy


def test_what_is_exported_gives_transformers_the_same_loss_and_comes_back_to_train_on(
    life, capfd, tmp_path
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown = run_command(capfd, "export", life / "run", "--out", tmp_path / "exported")
    assert "LlamaForCausalLM" in shown
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").encode("breit")

    def model_loss(batch):
        logits = model(batch.tokens).logits[..., :300]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )

    nats, batch, _ = whole_model_loss(life, model_loss)
    trained = numbers(run_command(capfd, "evaluate", life / "run"))[0]
    assert nats / batch.targets.numel() == pytest.approx(trained, abs=2e-4)

    imported = run_command(
        capfd, "import", tmp_path / "exported", "--out", tmp_path / "imported"
    ).strip()
    named = tmp_path / "by-name" / "step-00000000"
    assert str(named) in run_command(capfd, "import", tmp_path / "exported", "--out", named)
    assert (named / "checkpoint.json").is_file()
    again = ["import", str(tmp_path / "exported"), "--out", str(tmp_path / "imported")]
    assert main(again) == 2
    assert "imported: holds checkpoints; need another --out" in capfd.readouterr().err
    lines = runs.run(
        life / "config.yaml", 4, f"checkpoint.resume={imported}", "model.vocab_size=300",
        "model.vocab_multiple=128",
        f"run.directory={tmp_path}/on", "train.steps=4", "data.split=[0.8,0.2]",
        "evaluate.batches=2", "evaluate.every=1", "optimizer.lr=0",
    )  # fmt: skip
    assert runs.valid_losses(lines)[0] == pytest.approx(trained, abs=2e-4)
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]


def test_a_model_in_bf16_as_on_a_gpu_gives_the_logits_of_fp32(life):
    path, cpu = newest(life / "run"), torch.device("cpu")
    config, tokens = checkpoints.saved_config(path), torch.arange(16).view(1, -1)
    model = checkpoints.load_model(path, config, cpu)
    exact, found = model(tokens), model.to(torch.bfloat16)(tokens)
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)
