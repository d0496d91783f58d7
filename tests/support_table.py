"""The support tables in README.md and docs/formats.md, from runs of the tiny models and what backends say.

python tests/support_table.py          rewrite the tables
python tests/support_table.py --check  exit with 1 if they are not what this machine finds
"""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import tiny

from common.errors import BimetalError
from common.ops import Ops
from common.quants import BLOCKS
from generate.backends import FINDERS, open_backend

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- written by python tests/support_table.py -->", "<!-- end of table -->"
FAMILIES = {  # what a person looks for: the tiny models that stand for it
    "Qwen3.5 / 3.6 dense (`qwen35`)": ("qwen35",),
    "Qwen3.5 / 3.6 MoE (`qwen35moe`)": ("qwen35moe",),
    "Qwen3, WeDLM by plain decoding (`qwen3`)": ("qwen3", "qwen3-yarn"),
    "Llama, SmolLM2 (`llama`)": ("llama", "llama-untied"),
    "Laguna-XS.2, M.1 (`laguna`)": ("laguna", "laguna-m1"),
    "GLM-4.7-Flash (`glm4_moe_lite`, `deepseek2`)": ("glm",),
}
CLOSE = 1e-3  # logits: far above rounding, far below the quietest mistake in tests/models/test_traps.py


def tables() -> dict[Path, str]:
    backends = {name: _open(name) for name in FINDERS}
    return {ROOT / "README.md": _models(backends), ROOT / "docs" / "formats.md": _types(backends)}


def _open(name: str) -> Ops | None:
    try:
        return open_backend(name, tiny.checkpoint("llama"))
    except BimetalError:
        return None


def _models(backends: dict[str, Ops | None]) -> str:
    lines = [_row("model (plain decoding, unquantized KV cache)", *backends), _row(*["---"] * (1 + len(backends)))]
    for family, names in FAMILIES.items():
        cells = ("not run here" if ops is None else _works(names, ops) for ops in backends.values())
        lines.append(_row(family, *cells))
    return "\n".join(lines)


def _works(names: tuple[str, ...], ops: Ops) -> str:
    for name in names:
        logits = tiny.logits_of(tiny.load(name, ops), tiny.golden(name)["ids"])
        if tiny.golden_errors(logits, name).logit > CLOSE:
            return "no"
    return "slow" if ops.name == "numpy" else "works"


def _types(backends: dict[str, Ops | None]) -> str:
    names = [name for name in BLOCKS if name[0] != "I" or name.startswith("IQ")]  # integers are no weights
    columns = {"GGUF type": names, "bits per weight": [f"{BLOCKS[name].bits_per_weight:g}" for name in names]}
    for backend, ops in backends.items():
        if ops is not None:
            columns[f"held by {backend}"] = [ops.holds(name) for name in names]
        if backend == "mlx" and ops is not None:
            columns[f"held by {backend} on a Mac's GPU"] = _on_metal(names)
    rows = zip(*columns.values(), strict=True)
    return "\n".join([_row(*columns), _row(*["---"] * len(columns)), *(_row(*row) for row in rows)])


def _on_metal(types: list[str]) -> list[str]:
    """What MLX would say there, in the type that most files' scales have."""
    import mlx.core as mx

    from mlx_backend.ops import MlxOps

    with mock.patch("mlx_backend.kernels.on_metal", return_value=True):
        return [MlxOps(mx.float16).holds(type_) for type_ in types]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> int:
    stale = 0
    for path, table in tables().items():
        text = path.read_text()
        head, _, rest = text.partition(BEGIN)
        now = f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"
        stale += now != text
        if "--check" not in argv:
            path.write_text(now)
    return int(stale > 0 and "--check" in argv)


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main(sys.argv[1:]))
