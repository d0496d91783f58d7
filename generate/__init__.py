"""Local LLM inference: `generate.load(model)` in Python, `python -m generate` on the command line.

>>> import generate
>>> llm = generate.load("smollm2")
>>> llm.chat([{"role": "user", "content": "Name a prime number."}], max_tokens=32).text
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from generate.llm import LLM, AsyncStream, Reply, Stream

_ours, _found = Path(__file__).parents[1] / "common", Path(next(iter(common.__path__)))
if not (_found / "reference.py").exists():
    raise ImportError(
        f"`import common` found {_found}, which shadows bimetal's own package at {_ours}; rename it or move it"
    )

__all__ = ["LLM", "AsyncStream", "Reply", "Stream", "load"]


def load(
    model: str = "demo",
    backend: str | None = None,
    ctx: int | None = None,
    progress: bool = False,
    draft: str | None = None,
    fa_window: int | None = None,
    max_kv_size: int | None = None,
    devices: Sequence[int] = (),
    split: Sequence[float] = (),
    draft_device: int | None = None,
) -> "LLM":
    """Load a model and start the one thread that owns it.

    model    a path to a GGUF file or a safetensors folder, "owner/repo" or "owner/repo:Q4_K_M" on the Hub, "smollm2",
             or "demo", which comes with the package and continues Python
    backend  "mlx", "cuda" or "numpy"; None picks what the machine has
    ctx      most tokens of prompt and reply together; None: what the model was trained for, on CUDA as far as it fits
    draft    a DFlash draft for the model, named as models are, or "demo": it makes decoding faster and changes no text
    fa_window  most positions that decoding attends to, for long contexts; it changes the text. None: all
    max_kv_size  most tokens whose keys and values are kept, the first four among them; it changes the text. None: all
    devices  NVIDIA GPUs by number, which share the model's layers in this order; empty: the first alone
    split    proportions of the model's bytes, one per device; empty: as memory is free
    draft_device  the GPU of the draft; None: the last of `devices`
    """
    from generate.backends import Placement
    from generate.llm import LLM

    return LLM(
        model,
        backend=backend,
        ctx=ctx,
        progress=progress,
        draft=draft,
        fa_window=fa_window,
        max_kv_size=max_kv_size,
        placement=Placement(devices, split, draft_device),
    )


def __getattr__(name: str) -> Any:
    """The classes, imported when first asked for: `python -m generate --help` needs none of them."""
    if name in __all__:
        from generate import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'generate' has no attribute {name!r}")
