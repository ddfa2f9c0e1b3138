"""YAML and JSON from strangers: what is too large or too deep is refused before it is built."""

import time

import pytest
import yaml

from megafrontier.common.parsing import MOST_NODES, parse_json, parse_yaml, read_text

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
)
MERGED = "\n".join(
    ["a0: &a0 {x: 1}"]
    + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 10)]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 10_000, "nested more than 50 deep, need less"),
        ("{a: " * 10_000, "nested more than 50 deep, need less"),
        ("- " * 10_000, "nested more than 50 deep, need less"),
        (LAUGHS, f"more than {MOST_NODES} values, need fewer"),
        (MERGED, f"more than {MOST_NODES} values, need fewer"),
        ("a: &a [*a]", "the alias \\*a lies inside its own anchor"),
        ("a: &a {b: *a}", "the alias \\*a lies inside its own anchor"),
        ("a: !!timestamp x", "could not determine a constructor"),
        ("a: !!set {x}", "could not determine a constructor"),
    ],
    ids=["lists", "mappings", "blocks", "aliases", "merges", "self", "inner", "time", "set"],
)
def test_yaml_that_would_grow_is_refused_quickly(text, reason):
    started = time.process_time()
    with pytest.raises(yaml.YAMLError, match=reason):
        parse_yaml(text)
    assert time.process_time() - started < 2


def test_aliases_count_as_what_they_stand_for_and_may_be_used():
    text = "base: &base {lr: 1}\nothers: [*base, {<<: *base, lr: !!float 2}]"
    assert parse_yaml(text) == {"base": {"lr": "1"}, "others": [{"lr": "1"}, {"lr": "2"}]}
    many = "a: &a [{}]\nb: [{}]"
    half = ", ".join(["x"] * (MOST_NODES // 30))
    parse_yaml(many.format(half, ", ".join(["*a"] * 25)))
    with pytest.raises(yaml.YAMLError, match="more than"):
        parse_yaml(many.format(half, ", ".join(["*a"] * 31)))


@pytest.mark.parametrize("depth", [52, 100_000])
def test_json_that_is_too_deep_is_a_value_error(depth):
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        with pytest.raises(ValueError, match="nested more than 50 deep"):
            parse_json(text)
    assert parse_json("[" * 50 + "1" + "]" * 50)


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbf" + b"x" * 7)
    assert read_text(path, 10) == "x" * 7
    with pytest.raises(ValueError, match="more than 9 bytes"):
        read_text(path, 9)
