"""Plain words: code, documentation, help texts and messages use the field's terms; CONTRIBUTING.md lists both."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PHRASES = {  # how CONTRIBUTING.md lists a phrase: the pattern that finds it
    "guess": r"\bguess(es|ed|ing)?\b",
    "behind N tokens": r"\bbehind (N\b|\d)",
    "wants, wanted": r"\bwant(s|ed)\b",
    "the way out": r"\bthe way out\b",
    "on its way": r"\bon (its|the|their) way\b",
    "rows that ride along": r"\brid(e|es|ing) along\b",
    "are not there": r"\b(is|are) not there\b",
    "say of, tell of": r"\b(say|says|said|tell|tells|told) of\b",
    "so many": r"\bso (many|much) (?!(more|that)\b)",
}
OPENING = re.compile(  # words with which a docstring begins neither with a verb nor with a type
    r"(are|as|at|beside|can|do|does|from|has|how|in|is|its?|may|not|of|on|so|such|that|these|they|this|those|to|under"
    r"|up|what|whatever|when|where|whether|which|who|whoever|with)\b",
    re.IGNORECASE,
)
ARTICLE = re.compile(r"(the|an?)\b", re.IGNORECASE)  # with which the docstring of a class may begin, a type
CODE = "common", "generate", "mlx_backend", "cuda_backend", "bimetal", "docs"  # folders whose docstrings are checked
SUFFIXES = {".py", ".md", ".cu", ".cuh", ".metal", ".h", ".cpp", ".html", ".js", ".ipynb", ".tsv", ".toml", ".yml"}
SKIPPED = {"build", "dist", "__pycache__", "node_modules"}  # folders, like those whose names begin with a dot
ALLOWED = {"CONTRIBUTING.md", "tests/test_words.py"}  # they list the phrases


def files() -> list[Path]:
    """Everything that we write for people to read."""
    environments = {p.parent.name for p in ROOT.glob("*/pyvenv.cfg")}  # of Python, under any name
    found = [p for p in ROOT.rglob("*") if p.suffix in SUFFIXES and not _skipped(p.relative_to(ROOT))]
    found = [p for p in found if p.relative_to(ROOT).parts[0] not in environments]
    names = {p: p.relative_to(ROOT).as_posix() for p in found if p.is_file()}
    quoted = {p for p, name in names.items() if name.startswith("tests/data/") and p.suffix != ".py"}  # others' texts
    return sorted(p for p, name in names.items() if name not in ALLOWED and p not in quoted)


def _skipped(path: Path) -> bool:
    return any(part in SKIPPED or (part.startswith(".") and part not in (".ci", ".github")) for part in path.parts)


def phrases(text: str) -> list[str]:
    """The lines of `text` that hold a phrase of the list, with the phrase; also where a line break divides it."""
    found = []
    for name, pattern in PHRASES.items():
        spaced = pattern.replace(" ", r"\s+(?:(?://|#)\s*)?")
        for match in re.finditer(spaced, text, re.IGNORECASE):
            found.append(f"{text.count(chr(10), 0, match.start()) + 1}: {name}")
    return found


def test_nothing_uses_them():
    assert len(files()) > 100
    found = {p.relative_to(ROOT).as_posix(): phrases(p.read_text(errors="replace")) for p in files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def clauses(source: str) -> Iterator[tuple[int, str]]:
    """The line of each module, class or function whose docstring begins with such a word, and the word."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if found := OPENING.match(text) or (ARTICLE.match(text) if is_function else None):
            yield getattr(node, "lineno", 1), found[0]


def test_docstrings_begin_with_a_verb_or_a_type():
    assert list(clauses('def f():\n    """What f does."""')) == [(1, "What")]
    assert list(clauses('"""How a file begins."""')) == [(1, "How")]
    assert list(clauses('def f():\n    """The sum."""')) == [(1, "The")]
    assert list(clauses('class A:\n    """A sum."""')) == []
    paths = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 200
    found = {path.relative_to(ROOT).as_posix(): list(clauses(path.read_text())) for path in paths}
    assert {name: places for name, places in found.items() if places} == {}


def test_contributing_lists_them():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in PHRASES if name not in text] == []


@pytest.mark.parametrize(
    "line",
    [
        "The draft guesses a token.",
        "a step behind 512 tokens",
        "x is wanted\nhere",
        "# rows that ride\n# along",
        "weights that are\n// not there",
        "It tells of a path.",
        "steps of so many rows",
    ],
)
def test_a_phrase_is_found(line):
    assert len(phrases(line)) == 1


def test_other_words_are_not():
    assert phrases("Say what lies behind the last token, and offer a way out; nobody can want more.") == []
