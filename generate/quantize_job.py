"""Job: the description of a run of `generate quantize`."""

from dataclasses import dataclass
from types import ModuleType

from common.checkpoint import Checkpoint
from common.quantize import Format
from common.recipe import Choice, Recipe, Weight, choose
from common.weights import Layout


@dataclass(frozen=True)
class Job:
    """A checkpoint, its model's table of weights, and the format of each matrix in the result."""

    checkpoint: Checkpoint
    family: str
    definition: ModuleType
    layout: Layout
    weights: dict[str, Weight]
    format: Format
    recipe: Recipe
    is_gguf: bool
    requantize: bool

    def choices(self) -> dict[str, Choice]:
        return {
            name: choose(weight, self.recipe, self.requantize, self.is_gguf) for name, weight in self.weights.items()
        }
