"""prepare and merge: the right bytes at any number of workers, whole or not at all."""

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megafrontier.cli import main
from megafrontier.common.errors import UserError
from megafrontier.data.corpus.indexed import HEADER, IndexedDataset
from megafrontier.data.corpus.merge import merge
from megafrontier.data.text.prepare import PrepareProgress, prepare
from megafrontier.data.tokenizers.tokenizer import MARKER, ByteTokenizer, load_tokenizer
from tests.data.corpora import read_corpus, write_corpus
from tests.processes import alive, children, wait_for

GENERAL = str(Path(__file__).parents[3] / "tokenizers" / "general-16k.model")


def write_lines(path: Path, texts: list[str]) -> str:
    """A .jsonl file of the texts."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def some_texts(count: int, start: int = 0) -> list[str]:
    """Texts of different lengths, some longer than others by far."""
    return [f"Text {i}:\n" + f"  word{i} and more" * (i * i % 97) for i in range(start, count)]


def test_the_output_is_megatrons_format_byte_for_byte(tmp_path: Path) -> None:
    # An independent writer, from the description of the format, gives the same files.
    texts = ["ab", "", "c\n", "dé"]
    made = prepare([write_lines(tmp_path / "x.jsonl", texts)], "bytes", tmp_path / "made", 1, True)
    documents = [[[*text.encode(), 256]] for text in texts if text]
    expected = write_corpus(tmp_path / "expected", documents)
    assert read_corpus(tmp_path / "made") == read_corpus(expected)
    assert (made.documents, made.tokens, made.text_bytes) == (3, 10, 7)


def test_without_append_eod_there_is_none(tmp_path: Path) -> None:
    prepare([write_lines(tmp_path / "x.jsonl", ["ab", "c"])], "bytes", tmp_path / "made", 1)
    assert IndexedDataset(tmp_path / "made").tokens.tolist() == [97, 98, 99]


def test_a_large_vocabulary_takes_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafrontier.data.tokenizers.tokenizer.ByteTokenizer.vocab_size", 70_000)
    prepare([write_lines(tmp_path / "x.jsonl", ["ab", "c"])], "bytes", tmp_path / "made", 1)
    expected = write_corpus(tmp_path / "expected", [[[97, 98]], [[99]]], "int32")
    assert read_corpus(tmp_path / "made") == read_corpus(expected)


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafrontier.data.text.files.BLOCK_BYTES", 10_000)
    texts = some_texts(500)
    inputs = [write_lines(tmp_path / "x.jsonl", texts)]
    for workers in (1, 3):
        prepare(inputs, GENERAL, tmp_path / str(workers), workers, append_eod=True)
    assert read_corpus(tmp_path / "1") == read_corpus(tmp_path / "3")
    corpus, tokenizer = IndexedDataset(tmp_path / "1"), load_tokenizer(GENERAL)
    assert len(corpus) == 500
    for i in (0, 7, 499):
        assert tokenizer.decode(corpus.document(i).tolist()) == texts[i]
        assert corpus.document(i)[-1] == tokenizer.eod


def test_the_same_tokenizer_in_hugging_faces_form_gives_the_same_corpus(tmp_path: Path) -> None:
    load_tokenizer(GENERAL).save(tmp_path / "theirs")
    (tmp_path / "theirs" / MARKER).unlink()
    inputs = [write_lines(tmp_path / "x.jsonl", some_texts(50))]
    for out, tokenizer in (("1", GENERAL), ("2", str(tmp_path / "theirs"))):
        prepare(inputs, tokenizer, tmp_path / out, 2, append_eod=True)
    assert read_corpus(tmp_path / "1") == read_corpus(tmp_path / "2")


def test_characters_without_a_piece_are_counted_with_the_documents_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3}
    fast = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    special = {"eos_token": "</s>", "unk_token": "<unk>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, **special)
    wrapped.save_pretrained(tmp_path / "tok")
    path = tmp_path / "x.jsonl"
    write_lines(path, ["ab", "aßb", "b", "ßaß€", "ab" * 9])
    path.write_text(path.read_text() + '{"text": 7}\n')
    words = ["prepare", str(path), "--tokenizer", str(tmp_path / "tok"), "--skip-bad"]
    for workers in ("1", "2"):
        assert main([*words, "--out", str(tmp_path / workers), "--workers", workers]) == 0
        said = "; 1 bad texts skipped; 4 tokens in 40.0% of the documents are <unk>: characters"
        assert said in capsys.readouterr().out
    assert main(["prepare", str(path), "--tokenizer", "bytes", "--skip-bad", "--out",
                 str(tmp_path / "b")]) == 0  # fmt: skip
    assert "<unk>" not in capsys.readouterr().out


def test_a_long_text_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megafrontier.data.text.files.BLOCK_BYTES", 3000)
    text = "one line é\n" * 50_000 + "日本" * 100_000 + " x" * 10_000
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "short.txt").write_text("short")
    inputs = [str(tmp_path / "long.txt"), str(tmp_path / "short.txt")]
    prepare(inputs, "bytes", tmp_path / "made", 2, append_eod=True)
    corpus = IndexedDataset(tmp_path / "made")
    assert len(corpus) == len(corpus.sizes) == 2
    assert corpus.document(0).tolist() == [*text.encode(), 256]


def spread_lines() -> str:
    return Path(os.__file__).read_text().replace("\n", "\n\n\n")


def save_tokenizer(folder: Path, begins_with_space: bool) -> str:
    """GPT-2's kind, or as Llama's begins each text with a space that is not there."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast = Tokenizer(models.BPE())
    if begins_with_space:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        fast.decoder = decoders.Metaspace(prepend_scheme="first")
    else:
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
    fast.train_from_iterator(
        [spread_lines()],
        trainers.BpeTrainer(vocab_size=500, special_tokens=["<eos>"], show_progress=False),
    )
    if begins_with_space:
        fast.pre_tokenizer = None
        replace = normalizers.Replace(" ", "\u2581")
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["ours", "as GPT-2", "as Llama"])
def test_a_long_text_has_the_tokens_that_it_has_in_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("megafrontier.data.text.files.BLOCK_BYTES", 3000)
    monkeypatch.setattr("megafrontier.data.text.files._READ_BYTES", 1000)
    spec = GENERAL if kind == "ours" else save_tokenizer(tmp_path / "tok", kind == "as Llama")
    text = spread_lines()
    (tmp_path / "long.txt").write_text(text)
    prepare([str(tmp_path / "long.txt")], spec, tmp_path / "made", 1)
    assert len(text) > 30_000
    made = IndexedDataset(tmp_path / "made").document(0).tolist()
    assert made == load_tokenizer(spec).encode(text)


def test_a_long_text_that_ends_in_nothing_to_say_ends_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last piece is blank, and some tokenizers have no token for that."""
    monkeypatch.setattr("megafrontier.data.text.files.BLOCK_BYTES", 3000)
    encode = ByteTokenizer.encode_batch
    monkeypatch.setattr(
        ByteTokenizer, "encode_batch", lambda self, texts: encode(self, [t.strip() for t in texts])
    )
    (tmp_path / "long.txt").write_text("word " * 600 + " " * 5000)
    prepare([str(tmp_path / "long.txt")], "bytes", tmp_path / "made", 1, append_eod=True)
    (tokens,) = (IndexedDataset(tmp_path / "made").document(0),)
    assert tokens.tolist().count(256) == 1
    assert tokens[-1] == 256


def test_a_document_longer_than_int32_has_several_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafrontier.data.corpus.writer.LONGEST_SEQUENCE", 700_000)
    (tmp_path / "long.txt").write_bytes(b"word " * 400_000)
    prepare([str(tmp_path / "long.txt")], "bytes", tmp_path / "made", 1)
    corpus = IndexedDataset(tmp_path / "made")
    assert (len(corpus), corpus.sizes.tolist()) == (1, [700_000, 700_000, 600_000])
    assert bytes(corpus.document(0).astype(np.uint8)) == b"word " * 400_000


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    line = json.dumps({"text": "some words of a text " * 50}) + "\n"
    peaks = []
    for lines in (4_000, 40_000):
        path = tmp_path / f"{lines}.jsonl"
        path.write_text(line * lines)
        code = f"""
from megafrontier.data.text.prepare import prepare
prepare([{str(path)!r}], "bytes", {str(tmp_path / "made")!r}, 1)
print(next(l.split()[1] for l in open("/proc/self/status") if l.startswith("VmHWM")))
"""
        run = [sys.executable, "-c", code]
        peaks.append(1024 * int(subprocess.run(run, capture_output=True, check=True).stdout))
    # 42 MB of text and 84 MB of tokens against a tenth of that.
    assert peaks[1] - peaks[0] < 15e6


def test_a_killed_run_leaves_no_corpus_and_the_next_one_makes_it_whole(tmp_path: Path) -> None:
    inputs = [write_lines(tmp_path / "x.jsonl", some_texts(9_000))]
    made, expected = tmp_path / "made" / "c", tmp_path / "expected"
    code = (
        f"import sys; from megafrontier.cli import main; sys.exit(main({arguments(inputs, made)}))"
    )
    victim = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    wait_for(lambda: Path(f"{made}.bin.partial").exists() and size(f"{made}.bin.partial") > 10**5)
    workers = children(victim.pid)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not {"c.bin", "c.idx"} & set(os.listdir(made.parent))
    assert len(workers) >= 2
    wait_for(lambda: not any(alive(pid) for pid in workers))
    for out in (made, expected):
        assert main(arguments(inputs, out)) == 0
    assert sorted(os.listdir(made.parent)) == ["c.bin", "c.idx"]
    assert read_corpus(made) == read_corpus(expected)


def arguments(inputs: list[str], out: Path) -> list[str]:
    """The command line."""
    return ["prepare", *inputs, "--tokenizer", GENERAL, "--out", str(out), "--workers", "2"]


def size(path: str) -> int:
    """Bytes of a file, which need not be there yet."""
    return os.stat(path).st_size if os.path.exists(path) else 0


def test_a_refused_run_leaves_an_older_corpus_as_it_was(tmp_path: Path) -> None:
    good, bad = write_lines(tmp_path / "good.jsonl", ["good"]), tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    prepare([good], "bytes", tmp_path / "out" / "c", 1)
    before = read_corpus(tmp_path / "out" / "c")
    with pytest.raises(UserError):
        prepare([good, str(bad)], "bytes", tmp_path / "out" / "c", 1)
    assert read_corpus(tmp_path / "out" / "c") == before
    assert sorted(os.listdir(tmp_path / "out")) == ["c.bin", "c.idx"]


def test_a_crash_while_publishing_never_pairs_an_old_index_with_new_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out" / "c", Path.rename
    prepare([write_lines(tmp_path / "old.jsonl", ["12345678"])], "bytes", out, 1)

    def crash_at_the_index(path: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", crash_at_the_index)
    with pytest.raises(KeyboardInterrupt):
        prepare([write_lines(tmp_path / "new.jsonl", ["abcd", "efgh"])], "bytes", out, 1)
    with pytest.raises(UserError, match=r"c\.idx: cannot read the corpus: No such file"):
        IndexedDataset(out)


def test_files_are_on_the_disk_before_they_get_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def watched_fsync(fd: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{int(fd)}")).name)
        fsync(fd)

    def watched_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    inputs = [write_lines(tmp_path / "x.jsonl", ["x"])]
    monkeypatch.setattr(os, "fsync", lambda fd: watched_fsync(getattr(fd, "fileno", lambda: fd)()))
    monkeypatch.setattr(Path, "rename", watched_rename)
    prepare(inputs, "bytes", tmp_path / "out" / "c", 1)
    assert sorted(events[:2]) == ["sync c.bin.partial", "sync c.idx.partial"]
    assert events[2:] == ["rename c.bin", "rename c.idx", "sync out"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "no space left on the disk"),
        (errno.EDQUOT, "no space left on the disk"),
        (errno.EFBIG, "file too large"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("megafrontier.data.corpus.writer.DocumentWriter.write_chunks", full)
    with pytest.raises(UserError, match=rf"made\.bin: {said}; nothing written"):
        prepare([write_lines(tmp_path / "x.jsonl", ["x"])], "bytes", tmp_path / "made", 1)
    assert os.listdir(tmp_path) == ["x.jsonl"]


@pytest.mark.parametrize("name", ["c.bin", "c.idx", "link.txt"])
def test_a_corpus_that_would_take_the_place_of_an_input_is_refused(
    tmp_path: Path, name: str
) -> None:
    """By whatever name the input is given."""
    made = tmp_path / (name if name.startswith("c.") else "c.bin")
    made.write_text("a text")
    if not name.startswith("c."):
        (tmp_path / name).symlink_to(made)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(
        UserError, match=rf"--out .*/c: .*{name} is one of the inputs; give another"
    ):
        prepare([str(tmp_path / name)], "bytes", tmp_path / "c", 1)
    assert made.read_text() == "a text"
    assert sorted(os.listdir(tmp_path)) == before


def test_progress_is_a_line_now_and_then_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megafrontier.data.text.prepare._PROGRESS_SECONDS", 0.0)
    prepare([write_lines(tmp_path / "x.jsonl", some_texts(50))], "bytes", tmp_path / "made", 1)
    told = capsys.readouterr().err
    assert re.search(r"^\d+\.\d of \d+\.\d MB read, \d+\.\d+ MB/s, [\d,]+ tokens/s$", told, re.M)


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with PrepareProgress(1_000_000) as progress:
        progress.update(500_000, 2_000_000, 700_000)
        progress.skipped("x.jsonl:4: [odd] text")
    assert re.search(r"MB/s, [\d,]+ tokens/s", terminal.getvalue())
    assert "skipped x.jsonl:4: [odd] text" in terminal.getvalue()


def test_two_writers_of_one_corpus_do_not_meet(tmp_path: Path) -> None:
    from megafrontier.data.corpus.writer import CorpusWriter

    with (
        CorpusWriter(tmp_path / "c", np.dtype(np.uint16)),
        pytest.raises(UserError, match="another process is writing"),
    ):
        prepare([write_lines(tmp_path / "x.jsonl", ["x"])], "bytes", tmp_path / "c", 1)


def test_a_writer_that_has_published_leaves_the_next_ones_files_alone(tmp_path: Path) -> None:
    """Which may have begun while the first waited for a slow folder."""
    from megafrontier.data.corpus.writer import CorpusWriter

    dtype = np.dtype(np.uint16)
    first = CorpusWriter(tmp_path / "c", dtype)
    first.data.write(b"\1\0")
    first.index.add(np.array([1], np.int32), np.array([1]))
    first.publish()
    with CorpusWriter(tmp_path / "c", dtype) as second:
        first.__exit__(None, None, None)
        assert second.partial_bin.exists()


def test_merging_equals_preparing_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megafrontier.data.corpus.merge._RANGE_BYTES", 1000)
    monkeypatch.setattr("megafrontier.data.corpus.merge._COPY_BYTES", 300)
    monkeypatch.setattr("megafrontier.data.corpus.merge._ENTRIES", 7)
    inputs = [
        write_lines(tmp_path / f"{i}.jsonl", some_texts(20 * i + 20, 20 * i)) for i in range(3)
    ]
    for i, path in enumerate(inputs):
        prepare([path], "bytes", tmp_path / f"part{i}", 1, append_eod=True)
    prepare(inputs, "bytes", tmp_path / "once", 1, append_eod=True)
    parts = [str(tmp_path / f"part{i}") for i in range(3)]
    assert main(["merge", *parts, "--out", str(tmp_path / "merged")]) == 0
    assert read_corpus(tmp_path / "merged") == read_corpus(tmp_path / "once")


def test_merging_keeps_documents_of_several_sequences(tmp_path: Path) -> None:
    one = [[[1, 2], [3]], [[4]]]
    other = [[[5]], [[6], [7, 8]]]
    parts = [str(write_corpus(tmp_path / n, d)) for n, d in (("a", one), ("b", other))]
    assert merge(parts, tmp_path / "merged") == 4
    expected = write_corpus(tmp_path / "expected", one + other)
    assert read_corpus(tmp_path / "merged") == read_corpus(expected)


def test_corpora_that_do_not_fit_are_not_merged(tmp_path: Path) -> None:
    narrow = str(write_corpus(tmp_path / "narrow", [[[1]]]))
    wide = str(write_corpus(tmp_path / "wide", [[[1]]], "int32"))
    with pytest.raises(UserError, match=r"wide: int32 tokens, .*narrow has uint16"):
        merge([narrow, wide], tmp_path / "out")
    with pytest.raises(UserError, match="is one of the corpora to merge"):
        merge([narrow, narrow], narrow)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("byte", "bit"),
    [
        (HEADER.size, 0),  # a size
        (HEADER.size + 4 * 2 + 3, 7),  # its sign
        (HEADER.size + 4 * 5 + 8 * 3, 1),  # a pointer
        (HEADER.size + 12 * 5 + 8 * 1, 4),  # the first sequence of a document
        (HEADER.size + 12 * 5 + 8 * 3, 2),
        (HEADER.size + 12 * 5 + 8 * 3 + 7, 7),
    ],
)
def test_a_damaged_index_is_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte: int, bit: int
) -> None:
    """The inputs may be deleted afterwards."""
    monkeypatch.setattr("megafrontier.data.corpus.merge._ENTRIES", 2)
    sound = write_corpus(tmp_path / "sound", [[[1]]])
    damaged = write_corpus(tmp_path / "damaged", [[[1, 2], [3]], [[4]], [[5, 6]], [[7]]])
    index = bytearray(Path(f"{damaged}.idx").read_bytes())
    index[byte] ^= 1 << bit
    Path(f"{damaged}.idx").write_bytes(index)
    with pytest.raises(UserError, match=r"^\S+damaged\.idx: damaged: .*; copy or prepare again$"):
        merge([str(sound), str(damaged)], tmp_path / "out" / "c")
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("command", ["prepare", "merge", "tokenizer"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert "--out" in capsys.readouterr().out
