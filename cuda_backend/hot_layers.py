"""Slots of hot experts on the device: kernels exchange the experts of a layer, and the host reads what they counted.

The host never decides an exchange: kernels/hot_experts.cu does, in the order of the stream.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cupy
import numpy as np

from common.errors import BimetalError
from common.expert_profile import Profile
from common.step import MAX_DECODE_ROWS
from cuda_backend.expert_stacks import Stack
from cuda_backend.launch import Stream, kernel
from cuda_backend.memory import Memory, upload
from cuda_backend.prototypes import HOT_LAYER

# kernels/hot_experts.cu
MOST, SWAPS, LEAVING, MAX_PARTS = 512, 16, 32, 6
# A score is a sum of uses, each faded by FADE per row. Tried, by simulation of 256 experts of which 60 % or 30 % have
# slots: hits of 81.3 and 56.6 % with 0.98, 81.6 and 56.7 % with 0.985, 81.4 and 56.5 % with 0.99
FADE = 0.985
COPIERS = 64  # CTAs that copy experts, 16 KiB each at a time: enough for the link, and others stay free


class Counts(NamedTuple):
    """Numbers that the kernels have counted since the start, by layer: int64, but the slots int32.

    slots       (layers, experts): slot of each expert now, -1 of cold ones
    uses        (layers, experts)
    needed      (layers,): experts that a layer needed, once per step
    cold        (layers,): needed experts that were cold, in steps of few rows
    in_prompts  (layers,): needed experts that were cold, in prefill steps
    exchanges   (layers,): experts that took the slots of others
    """

    slots: np.ndarray
    uses: np.ndarray
    needed: np.ndarray
    cold: np.ndarray
    in_prompts: np.ndarray
    exchanges: np.ndarray


class HotLayers:
    """The state of all layers with experts, on the device."""

    def __init__(
        self,
        stacks: Sequence[Sequence[Stack]],
        slots: np.ndarray,
        memory: Sequence[tuple[int, int]],
        profile: Profile | None,
        layers: Sequence[int],
        row_ids: int,
        stream: Stream,
    ):
        """Write the initial state. Raises BimetalError for more than 512 experts.

        stacks   the two of each layer
        slots    (layers, experts) int32: slot of each expert, -1 of cold ones
        memory   by layer, the address of the slots that hold its experts, and bytes of a slot
        profile  uses that scores begin with; None: scores begin with zeros
        layers   the layers' numbers in the profile
        row_ids  most ids that a row chooses
        """
        L, E = slots.shape
        if E > MOST:
            raise BimetalError(f"spark holds layers of at most {MOST} experts, and this model's have {E}")
        self.layers, self.E, self.stream = L, E, stream
        scores = np.zeros((L, E), np.float32)
        if profile is not None:
            counts = profile.counts[list(layers)]
            tokens = np.maximum(1, counts.sum(axis=1, keepdims=True) / profile.used)
            scores[:] = counts / tokens / (1 - FADE)
        self.slot_of, self.score = upload(slots, stream), upload(scores, stream)
        self.leaving = upload(
            np.array([_leaving(*layer) for layer in zip(slots, scores, strict=True)], np.int32), stream
        )
        sizes = 4 * (1 + 2 * SWAPS), 4 * (2 + MAX_DECODE_ROWS * row_ids), 8 * E, 8 * 4
        zeros = [upload(np.zeros(L * size, np.uint8), stream) for size in sizes]
        self.exchanged, self.seen, self.uses, self.counts = zeros
        structs, held = np.zeros(L, HOT_LAYER), {"slot_of": (self.slot_of, 4 * E), "score": (self.score, 4 * E)}
        held["leaving"] = self.leaving, 4 * LEAVING
        held |= zip(("exchanged", "seen", "uses", "counts"), zip(zeros, sizes, strict=True), strict=True)
        for i, (struct, pair, (address, slot_bytes)) in enumerate(zip(structs, stacks, memory, strict=True)):
            parts = _parts(pair)
            struct["part"][: len(parts)] = parts
            struct["parts"], struct["slots"], struct["slot_bytes"] = len(parts), address, slot_bytes
            for name, (array, size) in held.items():
                struct[name] = array.address + i * size
        self.structs = upload(structs.view(np.uint8), stream)
        stream.synchronize()

    def _at(self, i: int) -> int:
        return self.structs.address + i * HOT_LAYER.itemsize

    def fetch(self, i: int, choice: np.ndarray, ids: int, step: int, T: int, k: int) -> None:
        """Exchange experts of layer number i before a step of T rows multiplies by them.

        ids   address of the experts (T, k) int32 that rows chose; 0: one row, which `choice` describes, chooses them
        step  address of the StepState, which says how many rows are real; 0: all
        """
        per = max(1, -(-self.E // 32)) if not ids else 1
        kernel("hot_experts", "fetch", (f"CHOOSES={int(not ids)}", f"PER={per}"))(
            (COPIERS,), (256,), (self._at(i), choice, ids, step, T, k, self.E), stream=self.stream
        )

    def count(self, i: int, ids: int, step: int, T: int, k: int) -> None:
        """Count the experts (T, k) int32 at `ids` that rows of a prefill step chose in layer number i."""
        kernel("hot_experts", "count")((1,), (256,), (self._at(i), ids, step, T, k, self.E), stream=self.stream)

    def keep(self) -> None:
        """Count what the layers of a step have seen, and note their exchanges."""
        kernel("hot_experts", "keep")((self.layers,), (256,), (self.structs.address, self.E), stream=self.stream)

    def read(self) -> Counts:
        """Wait for the stream, and read what was counted."""
        uses, slots, counts = (
            self._numbers(self.uses, np.int64),
            self._numbers(self.slot_of, np.int32),
            self._numbers(self.counts, np.int64),
        )
        self.stream.synchronize()
        return Counts(slots, uses, *counts.T)

    def _numbers(self, memory: Memory, dtype: type) -> np.ndarray:
        out: np.ndarray = np.empty((self.layers, memory.nbytes // np.dtype(dtype).itemsize // self.layers), dtype)
        runtime = cupy.cuda.runtime
        runtime.memcpyAsync(out.ctypes.data, memory.address, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)
        return out


def _parts(stacks: Sequence[Stack]) -> list[tuple[int, int, int, int]]:
    """List the parts of an expert: address of its table, of expert 0 in host memory, bytes, offset in a slot."""
    parts, start = [], 0
    for stack in stacks:
        for s, offset in zip(stack.weight.segments, stack.offsets, strict=True):
            assert s.places
            parts.append((s.places.address, s.memory.address, s.expert_bytes, start + offset))
        start += stack.slot_bytes
    return parts


def _leaving(slots: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """List the residents of the lowest scores, then -1: (LEAVING,)."""
    held = np.flatnonzero(slots >= 0)
    held = held[np.argsort(scores[held], kind="stable")][:LEAVING]
    return np.concatenate([held, np.full(LEAVING - len(held), -1)])
