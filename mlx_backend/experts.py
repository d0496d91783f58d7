"""Slots of experts in MLX arrays: the matrices of `moe`, filled by threads while the device computes.

An array holds one matrix of every slot of a kind, as `mlx_backend/weights.py` would hold the matrices of all experts.
Bytes that are held as stored are read into their place; others are converted in a buffer of the reading thread.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from common.errors import BimetalError
from common.expert_forms import ExpertForm, components
from common.quants import dequantize, floats
from common.tensors import Tensor
from mlx_backend.quantized import fill_blocks, new_blocks
from mlx_backend.quantized import filled as zeros
from mlx_backend.weights import Packed, Part, Target, Weight, format_of, grouped, held_bytes, repack

FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


class SlotWeight(NamedTuple):
    """The weight of one matrix by slot, and the memory that records computations with it."""

    weight: Weight
    memory: "MlxSlots"


class MlxSlots:
    """Slots of experts of one or more kinds.

    last  output of the latest computation that reads slots: a slot is overwritten only after it
    """

    def __init__(self, forms: Mapping[int, ExpertForm], slots: Mapping[Hashable, int], dtype: mx.Dtype):
        self._kind_of = {layer: form.kind for layer, form in forms.items()}
        by_kind: dict[Hashable, ExpertForm] = {form.kind: form for form in forms.values()}
        self._kinds = {kind: _Kind(by_kind[kind], count, dtype) for kind, count in slots.items()}
        self.nbytes = sum(count * expert_bytes(by_kind[kind], dtype) for kind, count in slots.items())
        self.last: mx.array | None = None

    def buffers(self, layer: int, slot: int) -> list[np.ndarray]:
        return self._kinds[self._kind_of[layer]].buffers(slot)

    def landed(self, layer: int, slot: int, tensors: Sequence[Tensor]) -> None:
        self._kinds[self._kind_of[layer]].landed(tensors, slot)

    def wait(self) -> None:
        if self.last is not None:
            mx.eval(self.last)
            self.last = None

    def matrices(self, layer: int) -> tuple[SlotWeight, SlotWeight]:
        gate_up, down = self._kinds[self._kind_of[layer]].weights
        return SlotWeight(gate_up, self), SlotWeight(down, self)


def expert_bytes(form: ExpertForm, dtype: mx.Dtype) -> int:
    """Count the bytes of an expert in a slot."""
    return sum(held_bytes(tensor, dtype) for tensor in form.tensors)


class _Kind:
    """The arrays of one kind of experts, and the place of each stored tensor of an expert in them."""

    def __init__(self, form: ExpertForm, slots: int, dtype: mx.Dtype):
        self._places: list[_Place] = []
        self.weights = self._weight(form.gate_up, slots, dtype), self._weight(form.down, slots, dtype)
        self._own = threading.local()

    def _weight(self, tensors: Sequence[Tensor], slots: int, dtype: mx.Dtype) -> Weight:
        parts = []
        for group in grouped(tensors):
            part, arrays = _allocate(group, slots, dtype)
            parts.append(part)
            end = 0
            for tensor in group:
                start, end = end, end + tensor.shape[0]
                self._places.append(_Place(tensor, [array[:, start:end] for array in arrays], dtype))
        return tuple(parts)

    def buffers(self, slot: int) -> list[np.ndarray]:
        scratch = self._own.__dict__.setdefault("buffers", {})
        found = []
        for number, place in enumerate(self._places):
            for which, part in enumerate(components(place.tensor)):
                if place.direct[which]:
                    found.append(place.arrays[which][slot].reshape(-1).view(np.uint8))
                else:
                    key = number, which
                    if key not in scratch:
                        scratch[key] = np.empty(part.data.nbytes, np.uint8)
                    found.append(scratch[key])
        return found

    def landed(self, tensors: Sequence[Tensor], slot: int) -> None:
        for tensor, place in zip(tensors, self._places, strict=True):
            place.put(tensor, slot)


class _Place:
    """Place of one stored tensor of an expert: `arrays` (slots, rows, ...), whose bits NumPy may write.

    direct  by component of the tensor, whether its array holds the bytes as stored
    """

    def __init__(self, tensor: Tensor, arrays: Sequence[np.ndarray], dtype: mx.Dtype):
        self.tensor, self.arrays, self._dtype = tensor, arrays, dtype
        held = tensor.type in FLOATS and FLOATS[tensor.type] == dtype
        if tensor.scales is not None:
            same = [part.type == "U8" or FLOATS[part.type] == dtype for part in components(tensor)[1:]]
            self.direct = [True, *same]
        else:
            self.direct = [held]

    def put(self, tensor: Tensor, slot: int) -> None:
        """Convert the components of an expert's tensor that are not direct into its slot. Raises BimetalError."""
        target, own = format_of(tensor), [array[slot] for array in self.arrays]
        if isinstance(target, str):
            fill_blocks(tensor, own[0], own[1])
        elif target is None:
            if not self.direct[0]:
                own[0][...] = bits(dequantize(tensor), self._dtype)
        elif tensor.scales is not None:
            for which, part in enumerate(components(tensor)):
                if self.direct[which]:
                    continue
                if part.type == "BF16" and self._dtype == mx.float32:  # the low halves stay 0
                    own[which].view("<u2")[..., 1::2] = part.data.view("<u2")
                else:
                    own[which][...] = _scales(floats(part.data, part.type), self._dtype, tensor)
        else:
            scales = [
                np.empty(array.shape, np.float32 if target.mode == "affine" else array.dtype) for array in own[1:]
            ]
            repack(tensor, target, own[0], *scales)
            for array, values in zip(own[1:], scales, strict=True):
                array[...] = values if target.mode != "affine" else _scales(values, self._dtype, tensor)


def _scales(values: np.ndarray, dtype: mx.Dtype, tensor: Tensor) -> np.ndarray:
    """Convert finite float32 scales to bits of `dtype`. Raises BimetalError for one beyond its range."""
    if dtype == mx.float32:
        return values
    stored = bits(values, dtype)
    exponent = np.uint16(0x7C00 if dtype == mx.float16 else 0x7F80)
    if ((stored.view(np.uint16) & exponent) == exponent).any():
        raise BimetalError(f"{tensor.name}: a scale of its {tensor.type} groups is beyond {dtype}")
    return stored


def bits(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Round float32 values to `dtype`, in the form of `array_bits`: bfloat16 as uint16."""
    if dtype == mx.float32:
        return values
    if dtype == mx.float16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    words = values.view(np.uint32)
    rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def array_bits(array: mx.array) -> np.ndarray:
    """Return a view into the memory of an evaluated array; bfloat16, which NumPy lacks, as uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _allocate(group: Sequence[Tensor], slots: int, dtype: mx.Dtype) -> tuple[Part, list[np.ndarray]]:
    """Return the part that holds these tensors, stacked by rows, in every slot; and its arrays' bits."""
    rows, columns, target = sum(tensor.shape[0] for tensor in group), group[0].shape[1], format_of(group[0])
    if isinstance(target, str):
        blocks = new_blocks((slots, rows, columns), target)
        return blocks, [array_bits(blocks.words), array_bits(blocks.halves)]
    if not isinstance(target, Target):
        dense = zeros((slots, rows, columns), dtype)
        return dense, [array_bits(dense)]
    codes = zeros((slots, rows, columns * target.bits // 32), mx.uint32)
    affine = target.mode == "affine"
    groups = slots, rows, columns // target.group_size
    scales = [zeros(groups, dtype if affine else mx.uint8) for _ in range(2 if affine else 1)]
    part = Packed(codes, scales[0], scales[1] if affine else None, target.group_size, target.bits, target.mode)
    return part, [array_bits(array) for array in (codes, *scales)]
