"""The packages that a package may import: generate → common ← backends; inside common engine → decode → models → ops.

The rules hold for every import statement, at the top of a file, inside a function or under TYPE_CHECKING, and for
importlib.import_module and __import__ of a literal name, or of one that begins with a literal package.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("bimetal", "generate", "common", "mlx_backend", "cuda_backend", "metal_kernels")
CHOOSER = "generate.backends"  # the one module that imports a backend, in one function
BACKENDS = {"mlx_backend", "cuda_backend"}
ORACLES = {"mlx_lm", "torch", "transformers"}
# what the rest of common and the backends never see
ENGINE = {
    f"common.{name}"
    for name in (
        *("attention_scores", "checks", "draft_stretches", "embeddings", "engine", "joined_step", "row_runner"),
        *("rerank", "scores", "sequence", "slot", "slots", "stretches", "suspended", "warm_up"),
    )
}
UPPER = {"common.models", "common.decode", "common.pieces"} | ENGINE

# What the modules of a package may not import; the longest prefix of a module's name decides.
FORBIDDEN = {
    "common": {"generate", "mlx", "cupy"} | BACKENDS | ORACLES | UPPER,
    "common.models": {"generate", "mlx", "cupy", "common.decode"} | ENGINE | BACKENDS | ORACLES,
    "common.decode": {"generate", "mlx", "cupy"} | ENGINE | BACKENDS | ORACLES,
    "common.pieces": {"generate", "mlx", "cupy"} | ENGINE | BACKENDS | ORACLES,
    **{name: {"generate", "mlx", "cupy"} | BACKENDS | ORACLES for name in sorted(ENGINE)},
    "mlx_backend": {"generate", "cuda_backend", "cupy"} | ORACLES | UPPER,
    "mlx_backend.fallback": {"generate", "cuda_backend", "cupy", "torch", "transformers"} | UPPER,  # mlx-lm's models
    "mlx_backend.peer": {"generate", "cuda_backend", "cupy", "torch", "transformers"}
    | UPPER,  # mlx-lm to bench against
    "cuda_backend": {"generate", "mlx_backend", "mlx"} | ORACLES | UPPER,
    "bimetal": {"mlx", "cupy"} | BACKENDS | ORACLES,
    "generate": {"mlx", "cupy"} | BACKENDS | ORACLES,
    CHOOSER: ORACLES,  # it asks mlx and cupy what the machine has
}


@dataclass(frozen=True)
class Import:
    names: tuple[str, ...]  # what the statement may import: `from a import b` is a, and a.b if that is a module
    line: int
    function: str  # the outermost function around it, or ""


def imports(tree: ast.AST, package: str, function: str = "") -> Iterator[Import]:
    """Every import below `tree`, a part of a module of `package`, by absolute names.

    A computed name is "*"; one that begins with a literal package is the package and ".*".
    """
    for node in ast.iter_child_nodes(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names):
                for alias in names:
                    yield Import((alias.name,), line, function)
            case ast.ImportFrom(module, names, level):
                parents = package.split(".")[: len(package.split(".")) - (level or 1) + 1] if level else []
                base = ".".join([*parents, *([module] if module else [])])
                yield Import((base, *(f"{base}.{alias.name}" for alias in names)), line, function)
            case ast.Call(ast.Name("__import__" | "import_module") | ast.Attribute(_, "import_module"), args):
                yield Import((computed_name(args[0]) if args else "*",), line, function)
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        yield from imports(node, package, function or inside)


def computed_name(name: ast.expr) -> str:
    match name:
        case ast.Constant(value):
            return str(value)
        case ast.JoinedStr([ast.Constant(str(value)), *_]) if "." in value:
            return f"{value.rpartition('.')[0]}.*"
    return "*"


def wrong_arrows(path: str, source: str) -> list[str]:
    """The imports of the module at `path` (relative to the repository) that break the rules, a sentence each."""
    parts = path.removesuffix(".py").split("/")
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    tree = ast.parse(source, path)
    if parts[0] == "metal_kernels":
        logic = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        return [f"{path}:{s.lineno}: metal_kernels holds no Python logic" for s in logic]
    rule = max((prefix for prefix in FORBIDDEN if is_within(module, prefix)), key=len)
    found = list(imports(tree, ".".join(parts[:-1])))
    wrong = []
    for statement in found:
        names = [name for name in statement.names if any(may_be(name, target) for target in FORBIDDEN[rule])]
        if statement.names == ("*",) and module != CHOOSER:
            names = ["a computed name"]
        if names:
            wrong.append(f"{path}:{statement.line}: {rule} may not import {names[0]}")
    if module == CHOOSER:
        choosers = {
            s.function for s in found if s.names == ("*",) or any(is_within(n, b) for n in s.names for b in BACKENDS)
        }
        if len(choosers) > 1 or "" in choosers:
            wrong.append(f"{path}: one function imports the backends, not {sorted(choosers)}")
    return wrong


def may_be(name: str, target: str) -> bool:
    """Test whether an import of `name` may run a module of `target`."""
    return is_within(name, target) or (name.endswith(".*") and is_within(target, name[:-2]))


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def test_every_arrow() -> None:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(paths) > 10
    wrong = [w for path in paths for w in wrong_arrows(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert not wrong, "\n".join(wrong)


def circles(modules: dict[str, set[str]]) -> list[str]:
    """The modules on a circle, and those that import one: what is left when modules that import none are taken away."""
    left = {name: set(imported) for name, imported in modules.items()}
    while done := {name for name, imported in left.items() if not imported & left.keys()}:
        left = {name: imported for name, imported in left.items() if name not in done}
    return sorted(left)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == ["a", "b", "c", "d"]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("common/ops.py", "import mlx.core as mx"),
        ("common/ops.py", "from common.models import llama"),
        ("common/ops.py", "from common import models"),
        ("common/ops.py", "from . import engine"),
        ("common/step.py", "def f():\n    import cupy"),
        ("common/step.py", "class A:\n    async def f(self):\n        from torch.nn import functional"),
        ("common/reference.py", "if TYPE_CHECKING:\n    from common.decode.plain import plain"),
        ("common/reference.py", "try:\n    import transformers\nexcept ImportError:\n    pass"),
        ("common/tokenizer.py", "import importlib\nimportlib.import_module('mlx_lm.utils')"),
        ("common/tokenizer.py", "from importlib import import_module\nimport_module(name)"),
        ("common/tokenizer.py", "__import__('generate')"),
        ("common/tokenizer.py", "import_module(f'common.decode.{name}')"),
        ("common/decode/plain.py", "import_module(f'common.{name}')"),
        ("common/decode/plain.py", "import_module(f'{name}.engine')"),
        ("common/engine.py", "import os, mlx_backend.ops"),
        ("common/engine.py", "from generate import backends"),
        ("common/models/llama.py", "from common.decode.plain import plain"),
        ("common/models/llama.py", "from ..engine import Engine"),
        ("common/models/__init__.py", "from ..decode import plain"),
        ("common/models/__init__.py", "import cuda_backend"),
        ("common/decode/plain.py", "from common import engine"),
        ("common/decode/plain.py", "from .. import engine"),
        ("mlx_backend/ops.py", "import cuda_backend"),
        ("mlx_backend/ops.py", "from common.models.blocks import head"),
        ("mlx_backend/kv/cache.py", "from common.engine import Engine"),
        ("cuda_backend/__init__.py", "from mlx_backend import ops"),
        ("cuda_backend/ops.py", "import common.decode.plain"),
        ("cuda_backend/ops.py", "import generate"),
        ("generate/cli.py", "def f():\n    from mlx_backend import MlxOps"),
        ("generate/cli.py", "import cupy"),
        ("generate/backends.py", "from mlx_backend import MlxOps"),
        ("generate/backends.py", "def f():\n    import mlx_backend\ndef g():\n    import cuda_backend"),
        ("generate/backends.py", "def f():\n    import torch"),
        ("metal_kernels/__init__.py", '"""Kernels."""\nNAMES = []'),
    ],
)
def test_a_wrong_arrow_is_found(path: str, source: str) -> None:
    assert len(wrong_arrows(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("common/ops.py", "import numpy\nfrom common.step import Step\nfrom . import tensors"),
        ("common/hub.py", "def f():\n    from huggingface_hub import HfApi"),
        ("common/ops.py", "import mlxtra\nimport common.models_of_cars"),
        ("common/models/llama.py", "from common.ops import Ops\nfrom . import blocks\nfrom ..step import Step"),
        ("common/decode/plain.py", "from common.models import Model"),
        ("common/decode/registry.py", "import_module(f'common.decode.{name}')"),
        ("common/engine.py", "from common.decode.plain import plain\nfrom common.models import Model"),
        ("mlx_backend/ops.py", "import mlx.core as mx\nfrom common.ops import Ops\nfrom mlx_backend import kv"),
        ("cuda_backend/ops.py", "import cupy\nfrom common.reference import NumpyOps\nfrom .arena import Arena"),
        ("generate/cli.py", "from common.engine import Engine\nfrom generate.backends import open_backend"),
        (
            "generate/backends.py",
            "def f():\n    import mlx_backend\n    if x:\n        from cuda_backend import CudaOps",
        ),
        ("generate/backends.py", "def f():\n    import mlx.core\ndef g():\n    import cuda_backend"),
        ("generate/backends.py", "def f(name):\n    importlib.import_module(name)"),
        ("metal_kernels/__init__.py", '"""Kernels."""'),
    ],
)
def test_a_right_arrow_is_left_alone(path: str, source: str) -> None:
    assert wrong_arrows(path, source) == []
