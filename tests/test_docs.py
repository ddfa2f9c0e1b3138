"""Links of the documentation lead somewhere, and its site can be built."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from megafrontier.config import load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def anchors(page):
    """Those of a page's headings, as GitHub and mkdocs make them."""
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
        yield words.strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files_and_headings(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in set(anchors(target)), link


def test_the_recipes_text_is_the_one_of_its_published_loss(tmp_path, monkeypatch, capsys):
    sympy = pytest.importorskip("sympy")
    if sympy.__version__ != "1.14.0":
        pytest.skip("another version of the text")
    page = (ROOT / "docs" / "recipe.md").read_text()
    make_text, make_task = re.findall(r"<<'END'\n(.*?)END\n", page, re.DOTALL)
    (tmp_path / "runs" / "recipe-data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    exec(make_text, {})
    published = json.loads((ROOT / "docs" / "recipe.json").read_text())
    assert capsys.readouterr().out.strip() == published["text_sha256"]
    assert {published["text_sha256"], published["corpus_sha256"]} <= set(page.split())
    exec(make_task, {})
    assert capsys.readouterr().out in page
    task = yaml.safe_load((tmp_path / "runs/recipe-data/tasks/next_line.yaml").read_text())
    assert task["output_type"] == "multiple_choice"
    config = load_config("recipe-2m")
    assert int([*published["train"]][-1]) == int([*published["valid"]][-1]) == config.train.steps
    assert f"{published['valid'][str(config.train.steps)]:.3f}" in page


def test_the_citation_names_the_version_and_license_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for key in ("version", "license", "title"):
        assert cited[key] == project["name" if key == "title" else key]


def test_keys_that_answer_to_megatrons_arguments_exist():
    reference = (ROOT / "docs" / "configuration.md").read_text()
    keys = set(re.findall(r"^\| `([\w.\[\]]+)` \|", reference, re.MULTILINE))
    page = (ROOT / "docs" / "from-megatron.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    arguments = {name for row in rows for name in re.findall(r"`(--[\w-]+)`", row[0])}
    assert len(arguments) >= 60
    sections = "|".join({key.partition(".")[0] for key in keys if "." in key})
    named = re.compile(rf"`((?:{sections})\.[\w.]+)[`=]")
    found = {key for row in rows for cell in row[1:] for key in named.findall(cell)}
    assert len(found) >= 60
    assert found <= keys


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_sentence_begins_with_of(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert not re.findall(r"(?:^\W*|[.!?:;|*]\s+|\n\n)Of .*", text)


def test_the_site_has_all_pages_of_docs():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    found = set(re.findall(r"'([\w/-]+\.md)'", str(site["nav"])))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    figures = {page for page in pages if page.startswith("slow-network/")}
    added = {f"{name}.md" for name in ("contributing", "changelog")}  # by scripts/site_pages.py
    assert found == pages - figures | added


def test_the_site_is_built_without_a_warning(tmp_path, monkeypatch):
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("mkdocs")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path))
    build(config)
    page = (tmp_path / "reference" / "library" / "index.html").read_text()
    assert "Shard the state of any module over the levels of a mesh" in page
    (heading,) = re.findall(r'<h2 id="megafrontier.shard".*?</h2>', page, re.S)
    assert re.sub(r"<[^>]+>|\s|&para;", "", heading) == "megafrontier.shard"
    assert "<li><code>placement</code>: a name" in page.replace("<p>", "").replace("\n", "")
    pages = {at.parent.name: at.read_text() for at in tmp_path.rglob("index.html")}
    assert "<code>model.<wbr>vocab_<wbr>size</code>" in pages["configuration"]
    assert '<code><span class="option">--nodes</span> 1</code>' in pages["trust"]
    tables = [table for text in pages.values() for table in re.findall("<td.*?</td>", text, re.S)]
    assert not [cell for cell in tables if "\\|" in cell]  # GitHub shows a bar, mkdocs both
    hosts = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page)
    assert hosts == []
