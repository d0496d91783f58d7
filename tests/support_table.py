"""The support tables in README.md and docs/formats.md, from runs of the tiny models and what backends say.

python tests/support_table.py          rewrite the tables
python tests/support_table.py --check  exit with 1 if they are not what this machine finds
"""

import sys
from pathlib import Path

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
    held = {name: ops for name, ops in backends.items() if ops is not None}
    lines = [_row("GGUF type", "bits per weight", *(f"held by {name}" for name in held))]
    lines.append(_row(*["---"] * (2 + len(held))))
    for name, block in BLOCKS.items():
        if name[0] != "I" or name.startswith("IQ"):  # integers are no weights
            lines.append(_row(name, f"{block.bits_per_weight:g}", *(ops.holds(name) for ops in held.values())))
    return "\n".join(lines)


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
