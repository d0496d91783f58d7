"""Write the support tables of README.md, docs/formats.md and docs/speculative.md from runs of the tiny models.

It needs the `mlx` extra.

python tests/support_table.py          rewrite the tables
python tests/support_table.py --check  exit with 1 if they are not what this machine finds
"""

import sys
from pathlib import Path
from unittest import mock

import draft_table
import numpy as np
import tiny

from common.ops import Ops
from common.quants import BLOCKS
from generate.backends import open_backend

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- written by python tests/support_table.py -->", "<!-- end of table -->"
FAMILIES = {  # the family, and the tiny models that stand for it
    "Qwen3.5 / 3.6, dense and MoE (`qwen35`, `qwen35moe`)": ("qwen35", "qwen35moe"),
    "Qwen3, Qwen3-Next, Qwen3-VL's text, WeDLM, Qwen2.5 (`qwen3`, `qwen3next`, `qwen2`)": (
        *("qwen3", "qwen3-yarn", "qwen3moe", "qwen3next", "qwen2"),
    ),
    "Llama, SmolLM, Mistral, Phi-3/4, Granite 3 (`llama`, `mistral`, `phi3`, ...)": (
        *("llama", "llama-untied", "smollm3", "mistral", "phi3", "phi4mini", "granite", "granitemoe"),
    ),
    "gpt-oss, Gemma 3, Laguna, OLMo 2/3, DeepSeek-V2-Lite, Moonlight (`gpt-oss`, `gemma3`, ...)": (
        *("gptoss", "gemma3", "laguna", "laguna-m1", "olmo2", "olmo3", "deepseek2", "deepseek3"),
    ),
    "GLM-4.5 to 4.7, GLM-4.7-Flash (`glm4_moe`, `glm4_moe_lite`)": ("glm4moe", "glm"),
}
CLOSE = 1e-3  # logits: far above rounding, far below the quietest mistake in tests/models/test_traps.py


COLUMNS = {  # of the table of models: the backend, and what stands in a cell where its golden files are met
    "CUDA": "tested on H200",  # by `pytest -m gpu tests/models` there: float16 keys and values have bounds of their own
    "MLX and Metal": "emulator-tested",  # the model on MLX's CPU device, the Metal kernels in tests/simt
    "NumPy": "works",
}


def tables() -> dict[Path, str]:
    """The text of each table, by the file that holds it."""
    backends = {name: open_backend(name, tiny.checkpoint("llama")) for name in ("mlx", "numpy")}
    docs = ROOT / "docs"
    return {
        ROOT / "README.md": _models(backends),
        docs / "formats.md": _types(backends),
        docs / "speculative.md": _drafts(backends),
    }


def _drafts(backends: dict[str, Ops]) -> str:
    head, *rows = draft_table.table(FAMILIES, {"NumPy": backends["numpy"], "MLX": backends["mlx"]})
    return "\n".join(_row(*cells) for cells in (head, ["---"] * len(head), *rows))


def _models(backends: dict[str, Ops]) -> str:
    lines = [_row("model", *COLUMNS), _row(*["---"] * (1 + len(COLUMNS)))]
    mlx, numpy = backends["mlx"], backends["numpy"]
    for family, names in FAMILIES.items():
        met = "works" if _on_a_mac() else COLUMNS["MLX and Metal"]
        cells = met if _works(names, mlx) else "no", COLUMNS["NumPy"] if _works(names, numpy) else "no"
        lines.append(_row(family, COLUMNS["CUDA"], *cells))
    return "\n".join(lines)


def _on_a_mac() -> bool:
    from mlx_backend.kernels import on_metal

    return on_metal()


def _works(names: tuple[str, ...], ops: Ops) -> bool:
    """Whether the tiny models of these names meet their golden logits."""
    return all(
        tiny.golden_errors(tiny.logits_of(tiny.load(name, ops), tiny.golden(name)["ids"]), name).logit <= CLOSE
        for name in names
    )


def _types(backends: dict[str, Ops]) -> str:
    names = [name for name in BLOCKS if name[0] != "I" or name.startswith("IQ")]  # integers are no weights
    columns = {"GGUF type": names, "bits per weight": [f"{BLOCKS[name].bits_per_weight:g}" for name in names]}
    for backend, ops in backends.items():
        columns[f"held by {backend}"] = [ops.holds(name) for name in names]
        if backend == "mlx":
            columns[f"held by {backend} on a Mac's GPU"] = _on_metal(names)
    rows = zip(*columns.values(), strict=True)
    return "\n".join([_row(*columns), _row(*["---"] * len(columns)), *(_row(*row) for row in rows)])


def _on_metal(types: list[str]) -> list[str]:
    """How MLX holds each type on a Mac's GPU, beside float16 scales, which most files have."""
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
