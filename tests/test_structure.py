"""The package is built as its documents say: words, sizes of files, and directions of imports."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megafrontier", "tests", "scripts", "slurm", "tokenizers")
PRIVATE = frozenset(
    (  # noqa: SIM905
        "at_hand is_at_hand let_go crossing crossings lane lanes Lane Lanes Ticket Turn Slot "
        "weave woven Shelf shelf Scratch Pool Runs Change came_by take_over outlive settle "
        "together seen_by_rank_0 to_replicas crowd Crowd Alone seal Arrangement arrangement "
        "arrange foresee crowded risky Verdict verdict judge Pending Moment DeferredRead "
        "Logbook logbook remark tell told Ending is_alike is_one_ranks RollCall "
        "rollcall neighbours Neighbours Activity culprits Watch watched backstop Backstop "
        "Attempt lease Lease Vectors LookUp remember upstream Need Translation Settings "
        "liberties habits strangers"
    ).split()
)


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Names of functions, classes, arguments, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=asname):
                yield asname or name.rpartition(".")[2]


def test_nothing_is_defined_under_a_private_word():
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT)
            words = {*place.parts[:-1], path.stem.removeprefix("test_")}
            words |= set(defined_names(ast.parse(path.read_text())))
            found += [f"{place}: {word}" for word in sorted(words & PRIVATE)]
    assert found == []


def test_no_folder_of_the_package_has_more_than_12_files_and_no_file_more_than_600_lines():
    files = sorted((ROOT / "megafrontier").rglob("*.py"))
    counts: dict[str, int] = {}
    for path in files:
        if path.stat().st_size:
            counts[str(path.parent)] = counts.get(str(path.parent), 0) + 1
    assert {folder: count for folder, count in counts.items() if count > 12} == {}
    lengths = {str(path): len(path.read_text().splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > 600} == {}


def test_no_module_imports_itself_by_way_of_others_not_even_inside_a_function():
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "megafrontier").rglob("*.py")
    }
    imports: dict[str, set[str]] = {}
    for module, path in paths.items():
        imports[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                imports[module] |= (names & paths.keys()) or ({node.module} & paths.keys())
    # Raises CycleError with the modules of a circle.
    assert set(TopologicalSorter(imports).static_order()) == paths.keys()


FLOORS = (
    {"common"},
    {"config"},
    {"parallel"},
    {"comm"},
    {"model", "partition"},
    {"splits", "optim", "checkpoint", "data", "families", "pipeline"},
    {"plan"},
    {"evaluation"},
    {"training"},
    {"sites"},
    {"planner"},
    {"launch", "report", "api", "commands", "probe", "certify"},
)


def test_a_package_imports_only_packages_of_its_own_floor_and_below():
    floors = {name: at for at, names in enumerate(FLOORS) for name in names}
    upwards = []
    for path in sorted((ROOT / "megafrontier").rglob("*.py")):
        place = path.relative_to(ROOT / "megafrontier")
        if place.parts[0] not in floors:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megafrontier."):
                package = str(node.module).split(".")[1]
                if floors.get(package, 0) > floors[place.parts[0]]:
                    upwards.append(f"{place}: {node.module}")
    assert upwards == []


def test_no_two_modules_define_classes_or_types_of_the_same_name():
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "megafrontier").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            match node:
                case ast.ClassDef(name=name):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)]) if not name.isupper():
                    pass
                case _:
                    continue
            if name[0].isupper():
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
