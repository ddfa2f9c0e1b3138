"""The engine of mutants: what its operators change, and how it tries what they make."""

import json
import os
import time
from collections import deque
from contextlib import closing
from pathlib import Path

import pytest

from scripts.mutants.by_hand import BY_HAND, hand_mutants
from scripts.mutants.choose import choose, files_of, mutate
from scripts.mutants.operators import OPERATORS, Source
from scripts.mutants.report import kind_of, read_lines, report
from scripts.mutants.trials import Trial, measure, run, trial_of
from tests.processes import alive
from tests.runs import make_config_file

PACKAGE = Path(__file__).resolve().parents[2] / "megafrontier"
EXAMPLES = {
    "reduction": ("total = world.sum(x)", "total = x"),
    "mean": ("total = x.sum(0)", "total = (x).mean(0)"),
    "axis": ("y = mesh.hierarchy('tensor')", "y = mesh.hierarchy('context')"),
    "arguments": ("y = cut(start, stop)", "y = cut(stop, start)"),
    "bound": ("y = x[first:last]", "y = x[(first) + 1:last]"),
    "scale": ("y = x * ranks", "y = (x)"),
    "sign": ("y = x + z", "y = ((x) - (z))"),
    "wait": ("chain.wait()", "pass"),
    "buffer": ("error.zero_()", "pass"),
    "hook": ("module.register_hook(f)", "pass"),
    "call": ("found.append(x)", "pass"),
    "dtype": ("y = x.double()", "y = (x).bfloat16().double()"),
    "seed": ("seed += rank * 3", "pass"),
    "mask": ("y = x.masked_fill(padding, 0)", "y = (x)"),
    "state": ("state = {'a': a, 'b': b}", "state = {'b': b}"),
    "group": ("y = group.weight_decay", "y = 0.0"),
    "comparison": ("y = x < z", "y = x <= z"),
    "condition": ("y = f(is_exact=True)", "y = f(is_exact=False)"),
}
TINY = """import os
def total(parts):
    found = 0
    for part in parts:
        found += part
    return found
def never():
    return 1 + 1
"""


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_changes_its_kind_of_place_and_nothing_around_it(name):
    old, new = EXAMPLES[name]
    text = f"def load_state():\n    a = 'é'\n    {old}\n    return a\n"
    places = [place for place in Source(text).places() if place.operator == name]
    assert {(place.line, place.last) for place in places} == {(3, 3)}
    assert text.replace(old, new) in [mutate("a.py", text, place).new for place in places]


def test_checks_names_and_messages_are_not_mutated():
    text = "def check(n):\n    if n < 1:\n        n += 1\ndef f(n: int = 0):\n    if n < 1:\n"
    text += "        raise ValueError(f'{n + 1}')\n    self.ledger.add(n * 2)\n    assert n + 1\n"
    assert Source(text).places() == []


def test_every_mutant_by_hand_changes_text_that_is_there_once_and_compiles():
    mutants = list(hand_mutants(PACKAGE))
    assert len(mutants) == len(BY_HAND) == len({mutant.key for mutant in mutants})
    for mutant in mutants:
        compile(mutant.new, mutant.file, "exec")


def test_chosen_mutants_depend_on_the_seed_alone_lie_on_executed_lines_and_compile():
    files = files_of(PACKAGE, ["optim/base.py", "optim/muon.py", "splits/cut.py"])
    executed = {file: set(range(30, 150)) for file in files}
    mutants = choose(PACKAGE, executed, 60, seed=3)
    assert [m.key for m in mutants] == [m.key for m in choose(PACKAGE, executed, 60, seed=3)]
    assert mutants[:20] == choose(PACKAGE, executed, 20, seed=3)
    assert mutants != choose(PACKAGE, executed, 60, seed=4)
    assert len({m.operator for m in mutants}) > 10
    assert {m.file for m in mutants} == {*files}
    for mutant in mutants:
        assert mutant.line < 150
        assert mutant.last >= 30
        compile(mutant.new, mutant.file, "exec")


def _package(folder: Path) -> Path:
    package = folder / "tiny_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text(TINY)
    return package


def _check(config: Path) -> list[str]:
    """A stand-in for certificates: promises that sums are right, in a process of its own too."""
    from tiny_package.sums import total  # type: ignore[import-not-found]

    if config.stem == "slow":
        pid = os.fork()
        while pid == 0:
            time.sleep(60)
        (config.parent / "pid").write_text(str(pid))
        time.sleep(60 if total([1]) == 2 else 0)
        return []
    return [] if total([1, 2]) == 3 else ["sum: wrong"]


def test_a_mutant_runs_the_certificates_of_its_lines_until_one_notices_and_leaves_no_process(
    tmp_path,
):
    package = _package(tmp_path)
    fast, slow = configs = [tmp_path / "fast.yaml", tmp_path / "slow.yaml"]
    measured = measure(package, configs, _check, jobs=2)
    assert measured[fast].lines["sums.py"] == {1, 2, 3, 4, 5, 6, 7}
    measured = {config: measured[config] for config in configs}
    trials = [
        trial_of(package, _replaced("found += part", "found = part"), measured),
        Trial(package, deque([slow]), _replaced("found += part", "found += 2 * (part)")),
        Trial(package, deque([fast]), _replaced("found += part", "found += patr")),
        Trial(package, deque([fast]), _replaced("found += part", "found += [part][1]")),
        trial_of(package, _replaced("for part in parts", "for part in [*parts]"), measured),
    ]
    with closing(run(iter(trials), _check, {fast: 20.0, slow: 2.0}, jobs=3)) as results:
        ends = {id(trial): end for trial, end, _ in results}
    sums, slow_one, misspelt, crashed, survived = (ends[id(trial)] for trial in trials)
    assert sums == "sum: wrong"
    assert trials[0].ran == ["fast"]
    assert slow_one == "hang"
    assert misspelt.startswith("crash: NameError")
    assert crashed.startswith("crash: IndexError")
    assert survived == ""
    assert trials[4].ran == ["fast", "slow"]
    assert not alive(int((tmp_path / "pid").read_text()))
    assert not any(trial.folder.exists() for trial in trials)


def _replaced(old: str, new: str):
    place = Source(TINY).places()[0]
    start = TINY.index(old)
    return mutate("sums.py", TINY, place._replace(start=start, stop=start + len(old), new=new))


def test_the_newest_line_of_a_mutant_counts_and_the_report_has_shares_and_survivors(tmp_path):
    path = tmp_path / "out.jsonl"
    line = {"operator": "sign", "file": "optim/a.py", "line": 3, "ran": ["dense"], "mirrors": ""}
    ends = {
        "a": ["", "losses: 2 > 1"],
        "b": [""],
        "c": ["crash: NameError"],
        "e": ["runs end well: no end after 9 s"],
        "d": ["hang"],
    }
    rows = [{**line, "key": k, "end": e, "diff": f"-{k}"} for k, es in ends.items() for e in es]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = {key: kind_of(line) for key, line in read_lines(path).items()}
    assert kinds == {"a": "promise", "b": "survived", "c": "trivial", "d": "hang", "e": "hang"}
    text = report(path)
    assert "| `sign` | + and - are exchanged | 4 | 1 | 0 | 2 | 1 | 75.0% |" in text
    assert "1 that do not start" in text
    assert "optim/a.py:3" in text
    assert "-b" in text


NOTICED = (
    "the z-loss counts on every tensor rank",
    "titan #3412",
    "#7452: the gradient of the target is lost",
)
"""The beginnings of what three mutants by hand mirror."""
TWO = (
    "parallel.tensor=2",
    "train.z_loss=0.01",
    "train.micro_batch=2",
    'machine={"levels": {"world": {}}}',
)


def _certify(config: Path) -> list[str]:
    from megafrontier.certify.command import certify
    from megafrontier.config import load_config

    found = certify(load_config(config, TWO), 2, until_broken=True)
    return [broken.promise for broken in found.broken]


@pytest.mark.fast
def test_a_certificate_is_green_and_not_of_three_broken_libraries(tmp_path):
    configs = [make_config_file(tmp_path)]
    mutants = {m.mirrors: m for m in hand_mutants(PACKAGE)}
    chosen = [m for about in NOTICED for m in mutants.values() if m.mirrors.startswith(about)]
    trials = [Trial(PACKAGE, deque(configs), mutant) for mutant in (None, *chosen)]
    with closing(run(iter(trials), _certify, {configs[0]: 900.0}, jobs=2)) as results:
        ends = {id(trial): end for trial, end, _ in results}
    assert [ends[id(trial)] for trial in trials] == ["", *["losses"] * len(NOTICED)]
