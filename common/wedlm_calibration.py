"""The calibrated window of a WeDLM model: a small JSON file next to the model, which `generate calibrate` writes."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from common.decoders import PRESETS, WedlmOptions
from common.errors import BimetalError, UsageError
from common.files import rewrite
from common.safetensors import read_json

NAME = "wedlm.json"  # in a folder; of a GGUF file, after its own name without .gguf
VALUES, MEASURED = ("window", "tau", "lambda"), ("agreement", "tokens_per_forward")


@dataclass(frozen=True)
class Calibration:
    """A window's options, and measurements with them.

    agreement           share of the tokens that plain greedy decoding would have chosen at their positions
    tokens_per_forward  mean over the forwards that filled a mask
    text                name of the file that the prompts were cut from
    """

    window: WedlmOptions
    agreement: float
    tokens_per_forward: float
    text: str

    def __str__(self) -> str:
        share = f"{self.agreement:.1%} agreement at {self.tokens_per_forward:.2f} tokens per forward"
        return f"{self.window.words} (window, tau, lambda): {share} on {self.text}"


def calibration_path(model: Path) -> Path:
    """Return the path at which the calibration of the model at `model`, a folder or a file, is kept."""
    return model / NAME if model.is_dir() else model.with_name(f"{model.stem}.{NAME}")


def write(model: Path, found: Calibration) -> Path:
    """Write a calibration next to the model, and return its path. Raises OSError."""
    window = found.window
    values = dict(zip(VALUES, (window.window, window.tau, window.penalty), strict=True))
    if window.checks:
        values["sure"] = window.sure
    rest = {name: value for name, value in asdict(found).items() if name != "window"}
    rewrite(calibration_path(model), json.dumps(values | rest, indent=1) + "\n")
    return calibration_path(model)


def read(model: Path) -> Calibration | None:
    """Return the calibration beside the model, if there is one. Raises BimetalError for a file that is none."""
    file = calibration_path(model)
    if not file.is_file():
        return None
    card = read_json(file)
    try:
        window, tau, penalty, agreement, length = (float(card[name]) for name in (*VALUES, *MEASURED))
        if not window.is_integer():
            raise ValueError(f"window is {window:g}")
        options = WedlmOptions(int(window), tau, penalty, sure=float(card.get("sure", math.inf)))
    except KeyError as error:
        raise BimetalError(f"{file} is not a calibration: it has no {error}; calibrate again") from None
    except (UsageError, TypeError, ValueError) as error:
        raise BimetalError(f"{file} is not a calibration: {error}; calibrate again") from None
    return Calibration(options, agreement, length, str(card.get("text", "")))


def window_beside(model: Path) -> WedlmOptions:
    """Return the window that replies of the model take where they are given none: as calibrated, else the preset."""
    found = read(model)
    return PRESETS["balanced"] if found is None else found.window
