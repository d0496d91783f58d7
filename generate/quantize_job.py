"""Job, which describes a run of `generate quantize`."""

from dataclasses import dataclass
from types import ModuleType

from common.checkpoint import Checkpoint
from common.quantize import Format
from common.recipe import Choice, Recipe, Weight, choose
from common.weights import Layout


@dataclass(frozen=True)
class Job:
    """A checkpoint, what its model makes of it, and what is to become of each matrix."""

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
