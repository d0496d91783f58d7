"""Experts in NumPy as the file stores them, in slots or all in memory, decoded each time an expert is used."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from common.expert_forms import ExpertForm, filled
from common.quants import dequantize
from common.tensors import Tensor

KEPT = ("MXFP4", "mxfp4")  # types of experts that stay packed in memory: gpt-oss-20b would take 84 GB in float32


class PackedExperts:
    """Experts (E, rows, columns) in stored types: `experts[i]` is (rows, columns) float32, like a resident matrix."""

    def __init__(self, parts: Sequence[Tensor]):
        self._parts = [replace(_copied(part), scales=part.scales and _copied(part.scales)) for part in parts]
        self.nbytes = sum(part.nbytes for part in self._parts)

    def __len__(self) -> int:
        return self._parts[0].shape[0]

    def __getitem__(self, expert: int) -> np.ndarray:
        index = np.array([expert])
        return np.concatenate([dequantize(part.take_rows(index))[0] for part in self._parts], axis=-2)


def _copied(tensor: Tensor) -> Tensor:
    return replace(tensor, data=np.array(tensor.data))


class NumpySlots:
    """Slots of experts of one or more kinds."""

    def __init__(self, forms: Mapping[int, ExpertForm], slots: Mapping[Hashable, int]):
        self._forms = forms
        sizes: dict[Hashable, int] = {form.kind: form.nbytes for form in forms.values()}
        self._rows = {kind: np.empty((count, sizes[kind]), np.uint8) for kind, count in slots.items()}
        self.nbytes = sum(rows.nbytes for rows in self._rows.values())

    def buffers(self, layer: int, slot: int) -> list[np.ndarray]:
        form = self._forms[layer]
        return np.split(self._rows[form.kind][slot], np.cumsum(form.sizes)[:-1])

    def landed(self, layer: int, slot: int, tensors: Sequence[Tensor]) -> None:
        """Return at once: slots hold stored bytes."""

    def wait(self) -> None:
        """Return at once: NumPy has computed."""

    def matrices(self, layer: int) -> tuple[Any, Any]:
        count = len(self._forms[layer].gate_up)
        return SlotMatrix(self, layer, slice(count)), SlotMatrix(self, layer, slice(count, None))

    def tensors(self, layer: int, slot: int) -> list[Tensor]:
        return filled(self._forms[layer].tensors, self.buffers(layer, slot))


class SlotMatrix:
    """Matrices of a layer's experts by slot: `matrix[slot]` is (rows, columns) float32, like a resident matrix."""

    def __init__(self, slots: NumpySlots, layer: int, parts: slice):
        self._slots, self._layer, self._parts = slots, layer, parts

    def __getitem__(self, slot: int) -> np.ndarray:
        tensors = self._slots.tensors(self._layer, slot)[self._parts]
        return np.concatenate([dequantize(tensor) for tensor in tensors], axis=-2)
