"""The documentation: README stays short, links lead somewhere, and tables and figures are what their scripts write."""

import inspect
import io
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest

import generate
from common.options import ChatOptions, LoadOptions
from common.pieces import Logprob, Piece, Stats
from generate.cli import parse

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "DECISIONS.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    tree = text.partition("## Where things are")[2].split("```")[1]
    assert len(tree.strip().splitlines()) <= 25


def test_readme_names_files_that_exist():
    tree = (ROOT / "README.md").read_text().partition("## Where things are")[2].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        first = line.split()[0]
        if not line.startswith(" "):
            folder = ROOT / first
        assert (folder / first if line.startswith(" ") else ROOT / first).exists(), line
        for name in re.findall(r"\b[a-z_0-9]+\.(?:py|md)\b", line):
            assert any(ROOT.glob(f"*/**/{name}")), f"{line}: no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page):
    folders = "tests|common|generate|cuda_backend|mlx_backend|metal_kernels|examples"
    names = [name.rstrip("./") for name in re.findall(rf"\b(?:{folders})/[\w/*.]+", page.read_text())]
    assert [name for name in names if "NAME" not in name and not any(ROOT.glob(name))] == []


def test_extending_names_what_a_family_needs():
    """Whatever the code reads from a family's module is in the list for a new one."""
    sources = [path.read_text() for folder in ("common", "generate") for path in (ROOT / folder).rglob("*.py")]
    pattern = r"\b(?:definition|architecture\(checkpoint\)\[1\])\.(\w+)|getattr\([^,]+, \"([A-Z_\d]+)\""
    found = {"".join(names) for text in sources for names in re.findall(pattern, text)}
    assert {"read_config", "EXCEEDS_FLOAT16", "MTP", "NORM_FIX"} <= found
    listed = (ROOT / "docs/extending.md").read_text().partition("## A model family")[2].partition("\n## ")[0]
    assert [name for name in sorted(found) if not re.search(rf"`{name}\b", listed)] == []


def test_extending_names_what_exists():
    """Files, and names in capitals that stand before `in` and a file."""
    text = re.sub(r"\s+", " ", (ROOT / "docs/extending.md").read_text())
    files = re.findall(r"`((?:common|generate|tests|cuda_backend|mlx_backend|metal_kernels)/[\w/.]+)`", text)
    assert [name for name in files if not (ROOT / name).exists() and "NAME" not in name] == []
    named = re.findall(r"((?:`\w+`(?:, | and )?)+) (?:in|of) `([\w/]+\.py)`", text)
    pairs = [(name, file) for names, file in named for name in re.findall(r"`(\w+)`", names)]
    assert len(pairs) > 20
    lacking = [p for p in pairs if not re.search(rf"(?m)^\s*(?:def |class )?{p[0]}\b", (ROOT / p[1]).read_text())]
    assert lacking == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in anchors(path), f"{target}: {path.name} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_are_understood(page, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for command in re.findall(
            r"python -m generate ((?:'[^']*'|\"[^\"]*\"|#.*|[^'\"#\n])*)", block.replace("\\\n", " ")
        ):
            words = shlex.split(command, comments=True)
            argv = [*takewhile(lambda word: word not in ("|", "&&", ">", "<", "&"), words)]
            if "--help" not in argv:
                parse(argv)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_blocks_are_python(page):
    for block in python_blocks(page):
        compile(block, page.name, "exec")


@pytest.mark.long
def test_python_page_runs(tmp_path, monkeypatch, capsys):
    """Each block prints what its comments show; those that need a download or a missing extra are left out."""
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "session"}
    for block in python_blocks(ROOT / "docs/python.md"):
        if not block.startswith("# download") and not ("extra: grammar" in block and find_spec("llguidance") is None):
            exec(compile(block, "docs/python.md", "exec"), session)
    with pytest.raises(generate.BimetalError, match="is closed"):
        session["llm"].generate("x")
    said = capsys.readouterr().out.splitlines()
    assert said.count("cancelled") == 1
    assert "generate() has no option max_new_tokens; did you mean max_tokens?" in said
    assert said[-1].startswith("PromptTooLongError the prompt has ")


def test_python_page_names_everything():
    """Options, methods and properties of a model, and the fields of what a caller gets."""
    classes = (LoadOptions, ChatOptions, generate.Reply, Piece, Stats, Logprob)
    names = {field.name for each in classes for field in fields(each)}
    for each in (generate.LLM, generate.Reply, generate.Stream, generate.AsyncStream, Stats):
        names |= {name for name, _ in inspect.getmembers(each) if not name.startswith("_")}
    text = (ROOT / "docs/python.md").read_text()
    assert sorted(name for name in names if not re.search(rf"`(?:\w+\.)?{name}\b", text)) == []


def test_what_the_first_commands_install():
    """MLX comes on Apple Silicon alone, and the small chat model brings no llama.cpp to compile."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    mlx = [each for each in project["dependencies"] if each.startswith("mlx")]
    assert [each.partition("; ")[2] for each in mlx] == ["platform_system == 'Darwin' and platform_machine == 'arm64'"]
    packages = project["dependencies"] + [each for extra in project["optional-dependencies"].values() for each in extra]
    assert [each for each in packages if "smollm2" in each or "llama-cpp" in each] == []
    assert project["scripts"] == {"bimetal": "generate.__main__:script"}
    first, second = re.findall(r"^(?:.* && )?python -m generate (.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)[
        :2
    ]
    assert parse(shlex.split(first)).model == "smollm2"
    assert parse(shlex.split(second)).options["max_tokens"] <= 200


def test_the_index_names_every_page():
    text = (ROOT / "docs/README.md").read_text()
    assert [p.name for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in text] == []
    text = (ROOT / "docs/experiments/README.md").read_text()
    assert [p.name for p in sorted((ROOT / "docs/experiments").glob("*.md"))[1:] if p.name not in text] == []


def test_tables_and_figures_are_made_of_the_log():
    found = subprocess.run([sys.executable, "-m", "docs.figures", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


def test_support_tables_are_what_the_script_writes(monkeypatch):
    """The models themselves run in tests/models/test_golden.py."""
    pytest.importorskip("mlx.core")
    import draft_table
    import support_table

    monkeypatch.setattr(support_table, "_works", lambda names, ops: True)
    monkeypatch.setattr(draft_table, "works", lambda kind, name, ops: True)
    stale = [path.name for path, table in support_table.tables().items() if table not in path.read_text()]
    assert stale == []
