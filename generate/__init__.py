"""Local LLM inference: `generate.load(model)` in Python, `python -m generate` on the command line.

>>> import generate
>>> llm = generate.load("smollm2")
>>> llm.chat([{"role": "user", "content": "Name a prime number."}], max_tokens=32).text
"""

import os
import pathlib
import typing

import common
from generate.interrupts import end_quietly

end_quietly()
# OpenBLAS reads this as NumPy is loaded: its idle threads sleep after 2^14 cycles. By default they spin for 0.1 s, and
# a token takes ten times as long beside other programs (docs/experiments/numpy.md).
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "14")
_ours, _found = pathlib.Path(__file__).parents[1] / "common", pathlib.Path(next(iter(common.__path__)))
if not (_found / "reference.py").exists():
    raise ImportError(
        f"`import common` found {_found}, which shadows bimetal's own package at {_ours}; rename it or move it"
    )

from common.errors import BimetalError, UsageError  # noqa: E402  what the check above makes sure of
from common.keywords import P, with_keywords  # noqa: E402
from common.options import LoadOptions  # noqa: E402

if typing.TYPE_CHECKING:
    from common.infill import Gap
    from generate.llm import LLM
    from generate.streams import AsyncStream, Reply, Stream

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncStream", "BimetalError", "Gap", "Reply", "Stream", "UsageError", "load"]


class _Load(typing.Protocol[P]):
    def __call__(self, model: str | os.PathLike[str] = "demo", *args: P.args, **options: P.kwargs) -> "LLM": ...


def _load_with(options: typing.Callable[P, LoadOptions]) -> _Load[P]:
    def load(model: str | os.PathLike[str] = "demo", options: LoadOptions | None = None) -> "LLM":
        """Load a model and start the one thread that owns it.

        model  a path to a GGUF file or a safetensors folder, "owner/repo" or "owner/repo:Q4_K_M" on the Hub, "smollm2",
               "demo", which comes with the package and continues Python, or "demo-wedlm", which fills windows
        """
        from generate.llm import LLM

        return LLM(model, options)

    return with_keywords(LoadOptions, load)  # type: ignore[return-value]


load = _load_with(LoadOptions)


def __getattr__(name: str) -> typing.Any:
    """Import the classes when first asked for: `python -m generate --help` needs none of them."""
    if name in __all__:
        from generate import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'generate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "__name__", "__path__", "__version__"])
