"""The shape of the code: functions have few parameters, and no modules of a package import one another in a circle."""

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from test_arrows import PACKAGES, ROOT, circles, imports, is_within

MOST_PARAMETERS = 9  # beside self and cls
RECEIVERS = ("self", "cls")


def modules(package: str) -> dict[str, Path]:
    """The files of a package by the names of their modules, without the package's own `__init__`."""
    paths = {path: path.relative_to(ROOT).with_suffix("").parts for path in (ROOT / package).rglob("*.py")}
    named = {".".join(parts).removesuffix(".__init__"): path for path, parts in paths.items()}
    return {name: path for name, path in named.items() if name != package}


def long_functions(path: str, source: str) -> Iterator[str]:
    """The functions with more than MOST_PARAMETERS parameters, a line each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            a = node.args
            names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p is not None]
            count = len(names) - (names[:1] != [] and names[0] in RECEIVERS)
            if count > MOST_PARAMETERS:
                name = "lambda" if isinstance(node, ast.Lambda) else node.name
                yield f"{path}:{node.lineno}: {name} has {count} parameters; at most {MOST_PARAMETERS}: take a struct"


def attributes(node: ast.ClassDef) -> set[str]:
    """What objects of a class have: fields, methods, parameters of the constructor, and what methods assign to self."""
    found = {f.name for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name | ast.Attribute) and isinstance(inner.ctx, ast.Store):
            found.add(inner.id if isinstance(inner, ast.Name) else inner.attr)
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            found |= {p.arg for p in (*inner.args.args, *inner.args.kwonlyargs)}
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Tuple):  # __slots__
            found |= {v.value for v in inner.value.elts if isinstance(v, ast.Constant)}
    return found


def described(node: ast.ClassDef) -> list[str]:
    """The attributes that a docstring describes, in lines of names, two spaces or more, and words."""
    lines = re.findall(r"^(\w+(?:, \w+)*) {2,}\S", ast.get_docstring(node) or "", re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


def test_classes_have_the_attributes_that_they_describe() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    classes = [c for p in paths for c in ast.walk(ast.parse(p.read_text())) if isinstance(c, ast.ClassDef)]
    of_name = {c.name: c for c in classes}

    def held(node: ast.ClassDef) -> set[str]:
        bases = {re.split(r"[.\[]", ast.unparse(base))[-1] for base in node.bases} & of_name.keys()
        return attributes(node).union(*(held(of_name[base]) for base in bases if base != node.name))

    assert sum(map(len, map(described, classes))) > 500
    assert [(c.name, name) for c in classes for name in described(c) if name not in held(c)] == []


def test_functions_have_few_parameters() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 100
    found = [line for p in paths for line in long_functions(p.relative_to(ROOT).as_posix(), p.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def f(a, b, c, d, e, f, g, h, i): pass", 0),
        ("def f(a, b, c, d, e, f, g, h, i, j): pass", 1),
        ("def f(self, a, b, c, d, e, f, g, h, i): pass", 0),
        ("class A:\n    async def f(cls, a, b, c, /, d, e, *f, g, h, i, **j): pass", 1),
        ("def f():\n    return lambda a, b, c, d, e, f, g, h, i, j: 0", 1),
        ("def f(context, a, b, c, d, e, f, g, h, i): pass", 1),
        ("def f(*args): pass", 0),
    ],
)
def test_functions_with_many_parameters_are_found(source: str, count: int) -> None:
    assert len(list(long_functions("a.py", source))) == count


def test_stores_of_caches_name_their_parameters() -> None:
    """Through `*args` no type of an argument is checked."""
    paths = sorted((ROOT / "cuda_backend" / "caches").glob("*.py"))
    functions = [f for path in paths for f in ast.walk(ast.parse(path.read_text())) if isinstance(f, ast.FunctionDef)]
    assert [f.name for f in functions].count("__init__") > 4
    assert [f.name for f in functions if f.args.vararg or f.args.kwarg] == []


def test_headers_of_kernels_name_their_launcher() -> None:
    """The file that the header names launches the kernel, by its name."""
    paths = [*ROOT.glob("cuda_backend/kernels/*.cu"), *ROOT.glob("metal_kernels/*.metal")]
    assert len(paths) > 40
    for path in paths:
        named = re.search(r"Launcher +(\S+\.py)", path.read_text())
        assert named, f"{path.name} names no launcher"
        assert f'"{path.stem}"' in (ROOT / named[1]).read_text(), f"{path.name}: {named[1]} does not launch it"


def test_headers_of_kernels_list_what_was_tried() -> None:
    """A paragraph `Tried` in the comment at the top: dropped variants, or that there are none."""
    paths = [*ROOT.glob("cuda_backend/kernels/*.cu"), *ROOT.glob("metal_kernels/*.metal")]
    for path in paths:
        header = takewhile(lambda line: line.startswith("//"), path.read_text().splitlines())
        assert any(line.startswith("// Tried ") for line in header), f"{path.name} does not list what was tried"


def test_the_cuda_package_names_each_of_its_files_once() -> None:
    folder = ROOT / "cuda_backend"
    lines = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "").splitlines()
    column = "".join(line[:26] for line in lines if line.startswith("    "))
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert sorted(re.findall(r"\w+(?:\.py|/)", column)) == sorted([*files, "caches/", "kernels/"])


@pytest.mark.parametrize("package", [package for package in PACKAGES if package != "metal_kernels"])
def test_no_circles(package: str) -> None:
    """Under TYPE_CHECKING and inside functions too; the package itself opens what it needs on demand."""
    found = modules(package)
    imported = {}
    for name, path in found.items():
        parents = path.relative_to(ROOT).parts[:-1]
        names = {n for statement in imports(ast.parse(path.read_text()), ".".join(parents)) for n in statement.names}
        if path.name == "__init__.py":  # importing a module of a package runs the package: no edge back to it
            names = {n for n in names if not is_within(n, name)}
        imported[name] = names & found.keys()
    assert circles(imported) == []
