"""Checks that a draft fits its target."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Target:
    """Hidden size, vocabulary and number of layers of the target that a draft must fit."""

    hidden: int
    vocab: int
    layers: int


def target_of(definition: ModuleType, config: Any) -> Target:
    """Return the sizes of a model of `definition` with the configuration `config`."""
    return Target(config.hidden, config.vocab, len(definition.state_spec(config)))
