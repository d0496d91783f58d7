"""The table of drafts by family in docs/speculative.md, from runs of tiny models with tiny drafts."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tiny
import tiny_draft
import tiny_eagle

from common.decode.alone import run_alone
from common.decode.run import DecoderRun
from common.decoders import Speculation
from common.models import Model
from common.models.drafts import load_pair
from common.ops import Ops
from common.sampling import Sampler, Sampling
from common.step import Step

PROMPT, NEW = 20, 12
Write = Callable[[Path, str, Model], Path]  # a draft into a folder, for a tiny target of that name


@dataclass(frozen=True)
class Kind:
    """A kind of draft.

    spec   the speculative mode to run it in
    write  makes a tiny one; None: the mode needs no draft
    names  tiny models that it can be had for; (): all
    """

    spec: str
    write: Write | None
    names: tuple[str, ...] = ()


def _block(folder: Path, name: str, target: Model) -> Path:
    return tiny.FOLDER / f"mtp-{name}"


def _dflash(folder: Path, name: str, target: Model) -> Path:
    c, layers = target.config, len(target.layout.layers)
    taps = [0, layers - 1]
    return tiny_draft.write(folder / "draft", c.hidden, c.vocab, layers, taps, laguna=name.startswith("laguna"))


def _like_golden(golden: str) -> Write:
    """The draft of a golden file, which reads three layers of eight, as one for a target of fewer layers."""

    def write(folder: Path, name: str, target: Model) -> Path:
        layers, path = len(target.layout.layers), folder / "draft"
        shutil.copytree(tiny.FOLDER / golden, path)
        values = json.loads((path / "config.json").read_text())
        own = {"num_target_layers": layers, "target_layer_ids": [layers - 3, layers - 2, layers - 1]}
        for place in (values, values.get("dflash_config", {})):
            place |= {key: value for key, value in own.items() if key in place}
        (path / "config.json").write_text(json.dumps(values))
        return path

    return write


def _eagle3(folder: Path, name: str, target: Model) -> Path:
    c = target.config
    return tiny_eagle.write(folder / "draft", c.hidden, c.vocab, [0, 1, len(target.layout.layers) - 1])


THREE_LAYERS = (
    "llama",
    "qwen3",
    "mistral",
    "phi3",
    "phi4mini",
    "qwen2",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "gemma3",
    "laguna",
    "laguna-m1",
    "glm",
    "glm4moe",
    "gptoss",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "deepseek2",
    "deepseek3",
    "granitemoe",
)  # at least, which the draft reads
KINDS: Mapping[str, Kind] = {
    "multi-token prediction": Kind("chain", _block, ("qwen35", "qwen35moe", "glm", "glm4moe")),
    "DFlash": Kind("tree", _dflash),
    "DFlash2": Kind("tree", _like_golden("dflash2"), THREE_LAYERS),
    "DSpark": Kind("tree", _like_golden("dspark"), THREE_LAYERS),
    "EAGLE-3": Kind("chain", _eagle3),
    "prompt lookup": Kind("lookup", None),
}


def table(families: Mapping[str, tuple[str, ...]], backends: Mapping[str, Ops]) -> list[tuple[str, ...]]:
    """The rows, the head first: a family in each, and for each kind the backends that gave the text of plain decoding.

    backends  by what the table calls them
    """
    rows = [("model", *KINDS)]
    for family, names in families.items():
        cells = []
        for kind in KINDS.values():
            has = [name for name in names if not kind.names or name in kind.names]
            met = [label for label, ops in backends.items() if has and all(works(kind, name, ops) for name in has)]
            cells.append(", ".join([*met, "CUDA"]) if met else "—")
        rows.append((family, *cells))
    return rows


def works(kind: Kind, name: str, ops: Ops) -> bool:
    """Whether the text with a tiny draft equals that of plain decoding."""
    target, prompt = tiny.load(name, ops), tiny.golden(name)["ids"][:PROMPT].astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        pair = target if kind.write is None else load_pair(kind.write(Path(folder), name, target), target)
        return _text(pair, prompt, Speculation(kind.spec, 5)) == _text(target, prompt, Speculation("off"))


def _text(model: Model, prompt: np.ndarray, how: Speculation) -> list[int]:
    state = model.new_state(64)
    logits = model.forward(state, Step.chain(prompt, 0), slice(PROMPT - 1, PROMPT))
    state.commit(range(PROMPT))
    run = DecoderRun(model, state, logits, Sampler(Sampling()), prompt.tolist(), how)
    return [token for token, _ in islice(run_alone(run), NEW)]
