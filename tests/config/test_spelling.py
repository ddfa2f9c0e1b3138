"""Text is what was written, whatever YAML would make of it."""

import pytest

from megafrontier.common.errors import UserError
from megafrontier.config import load_config, load_machine


@pytest.mark.parametrize("text", ["1.10", "2024_01_15", "0012", "12:30", "3e-4", "12e4567"])
def test_text_that_yaml_takes_for_a_number_stays_as_it_is_written(write, text):
    """Or runs named 1.1 and 1.10 would share a folder, and each take up the other's weights."""
    assert load_config(write("a.yaml", "{}"), [f"run.name={text}"]).run.name == text
    lines = f"run: {{name: {text}}}\ndata: {{train: [{{path: {text}, weight: 2}}]}}\n"
    config = load_config(write("b.yaml", lines))
    assert config.run.directory == f"runs/{text}"
    assert [(corpus.path, corpus.weight) for corpus in config.data.train] == [(text, 2)]
    chosen = [f"data.train=[{{path: {text}}}, {{path: b}}]", f"data.train[1].path={text}"]
    found = load_config(write("c.yaml", "{}"), chosen).data.train
    assert [corpus.path for corpus in found] == [text, text]
    machine = write("m.yaml", f"levels: {{world: {{}}}}\ndevice: {{name: {text}}}\n")
    assert load_machine(str(machine)).device.name == text


@pytest.mark.parametrize(
    ("text", "read"), [("010", "8"), ("-010", "-8"), ("1:30", "90"), ("1:30.5", "90.5")]
)
def test_a_number_that_yaml_reads_as_another_one_is_refused_by_key(write, text, read):
    def refused(lines, *overrides):
        with pytest.raises(UserError) as error:
            load_config(write("a.yaml", lines), overrides)
        return str(error.value)

    need = f"{text}, need a decimal number; YAML would read {read}"
    assert refused("{}", f"train.steps={text}") == f"train.steps: {need}"
    assert refused("{}", f"data.train=[{{path: a, weight: {text}}}]") == (
        f"data.train[0].weight: {need}"
    )
    assert refused(f"optimizer: {{lr: {text}}}").endswith(f"a.yaml: optimizer.lr: {need}")
    assert refused(f"data: {{skip: [[1, {text}]]}}").endswith(f": data.skip[0][1]: {need}")


@pytest.mark.parametrize(
    ("text", "value"), [("10", 10), ("+7", 7), ("0", 0), ("0x10", 16), ("1_000", 1000)]
)
def test_other_spellings_of_a_number_are_that_number(write, text, value):
    assert load_config(write("a.yaml", "{}"), [f"evaluate.every={text}"]).evaluate.every == value
