"""The models that come with the package: `demo-qwen35` and its drafts, and `demo-wedlm`. Made by examples/train."""

from pathlib import Path

from common.errors import BimetalError

FOLDER = Path(__file__).parent
TARGET, DRAFT = "demo-qwen35-{}.gguf", "demo-qwen35-dflash-Q8_0.gguf"
BLOCK = "demo-qwen35-mtp-Q8_0.gguf"
WEDLM = "demo-wedlm"


def is_demo(name: str) -> bool:
    """Test whether `name` is that of a model of the package."""
    return name == WEDLM or name.partition(":")[0] == "demo"


def block_beside(model: Path) -> Path | None:
    """Return the file of the multi-token-prediction block for `model`, a file of the package; None for other files."""
    is_target = model.name.startswith("demo-qwen35-Q") and model.resolve().parent == FOLDER.resolve()
    return FOLDER / BLOCK if is_target else None


def demo_path(name: str = "demo") -> Path:
    """Return the file of "demo" (the target, Q8_0), "demo:QUANT" (the target in another mix), "draft" or "demo-wedlm".

    Raises BimetalError for a mix that the package lacks.
    """
    if name == "demo:":
        raise BimetalError("demo: names no quantization; give demo, or one as in demo:Q4_K_S")
    if name == WEDLM:
        return FOLDER / "demo-wedlm-Q8_0.gguf"
    quant = name.removeprefix("demo").removeprefix(":").upper() or "Q8_0"
    path = FOLDER / (DRAFT if name == "draft" else TARGET.format(quant))
    if not path.is_file():
        mixes = sorted(p.stem.removeprefix("demo-qwen35-") for p in FOLDER.glob(TARGET.format("Q*")))
        raise BimetalError(f"the package has no {path.name}; of the demo model it has {', '.join(mixes) or 'no file'}")
    return path
