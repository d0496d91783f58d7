"""Base class of the ops of a backend: what loaders, the engine and predictions of memory call.

What models call is its subclass `common.ops.Ops`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import BimetalError
from common.expert_forms import ExpertForm, SlotMemory
from common.experts import ExpertSupply
from common.shards import ONE, Ranks
from common.step import MAX_DECODE_ROWS, Pool, State, Step
from common.storage import LayerSpec, grows
from common.tensors import Tensor

Array = Any  # the backend's own array; models see its shape, reshape it and slice it, nothing else
Weight = Any  # opaque: dense or any block format

VECTOR_ITEM = 4  # bytes: every backend holds vectors in float32


@dataclass(frozen=True)
class LayerSize:
    """Sizes of one layer's computation, which predict its workspace.

    mixer, ffn  numbers per row that enter and leave the matrices before and after the layer's second norm
    hidden      numbers per row of the residual stream
    heads       query heads of attention, 0 without
    expanded    numbers per past token to which latent attention expands keys and values, 0 without
    states      the layer's states
    gathered    part of `ffn`: numbers per row that a backend copies if each chosen expert gets the row as its own
    """

    mixer: int
    ffn: int
    hidden: int
    heads: int
    expanded: int
    states: LayerSpec
    gathered: int


def decoded_bytes(layer: LayerSize, tokens: int) -> int:
    """Predict the workspace of a step that decodes all rows of a compressed cache to float32."""
    rows = [s for s in layer.states.values() if grows(s) and s.is_packed]
    return sum(3 * 4 * s.rows(tokens) * s.numbers for s in rows)


class Backend(ABC):
    """Weights, states, memory and steps on one backend."""

    name: str  # "numpy", "mlx", "cuda"
    item_bytes: int  # of an activation, and of a cached key or value
    prefill_rows = 512  # of a prefill step: enough to fill the matrix units, few enough to react to Ctrl-C
    short_rows = MAX_DECODE_ROWS  # most rows of a prompt's step in which a row's bits do not depend on the other rows
    runs_ahead = False  # whether a step can be launched on a token that the host has not read yet
    joins = False  # whether a step can have rows of several sequences
    micro_batches = 1  # steps of different sequences that are computed at the same time, on different devices
    divides = False  # whether a step may compute some layers of a model, and a later one those after them
    replays = False  # whether a step of few rows is replayed from a captured graph
    warm_rows: Sequence[int] = ()  # row counts whose first steps are slow: kernels compile, graphs are captured
    draws = False  # whether `sample` can draw at random without copying logits to the host
    reserves = False  # whether a state allocates memory for its whole capacity at once
    cache_pairs: frozenset[tuple[str, str]] = frozenset()  # (keys, values): supported formats of caches
    expert_supply: ExpertSupply | None = None  # keeps some of a mixture's experts in memory; None: all are
    expert_vram = 0  # bytes of experts on the device that `held_expert_bytes` does not count
    ranks: Ranks = ONE  # this rank of tensor parallelism
    adapter_type = "F32"  # in which adapters are held: "Q8_0" if products of quantized matrices are faster
    checks_scales = False  # whether `loading` refuses scales that are not finite, which saves a read

    def prompt_rows(self, spec: Sequence[LayerSpec]) -> int:
        """Return the number of which the rows of long steps should be multiples, for a model with the states `spec`."""
        return 1

    # -- weights and states ----------------------------------------------------------------------------------------

    @abstractmethod
    def weight(self, *parts: Tensor) -> Weight:
        """Load a matrix (rows, columns) or experts (E, rows, columns), quantized as stored; parts are stacked rows."""

    def expert_weight(self, *parts: Tensor) -> Weight:
        """Load the experts (E, rows, columns) of a mixture; a backend may keep some of them outside of its memory."""
        return self.weight(*parts)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surround the loading of weights: they can be used after the block, and their tensors must live until its end.

        With `checks_scales` its end raises BimetalError for a scale that is not finite; else `weight` raises it.
        """
        yield

    def load(self, make: Callable[[Any], Any]) -> Any:
        """Return the model that `make` makes of these ops; several ranks of one process call it once each."""
        return make(self)

    def load_beside(self, model: Any, make: Callable[[Any], Any]) -> Any:
        """Return what `make` makes of `model`, the result of `load`; several ranks of one process call it once each."""
        return make(model)

    @abstractmethod
    def vector(self, tensor: Tensor) -> Array:
        """Load a small dense tensor (norm weights, conv taps, decay), at least as precise as the activations."""

    def loading_layer(self, layer: int) -> AbstractContextManager[None]:
        """Surround the loading of a layer, so that `weight` and `vector` load to the device of this layer.

        layer  its number in a state, in which the layers of a draft follow the target's
        """
        return nullcontext()

    def has_layer(self, layer: int | None) -> bool:
        """Test whether this process loads the weights of `layer`, or those outside of layers (None)."""
        return True

    @abstractmethod
    def weight_bytes(self, weight: Weight) -> int:
        """Count the bytes that `weight` occupies on the device."""

    @abstractmethod
    def holds(self, stored_type: str) -> str:
        """Describe how a matrix stored as `stored_type` is held: "as stored", "expanded to float32"."""

    @abstractmethod
    def new_state(self, spec: Sequence[LayerSpec], capacity: int) -> State:
        """Make an empty state for one sequence of at most `capacity` tokens."""

    def new_pool(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None) -> Pool | None:
        """Make states for up to `slots` sequences, whose rows share a step; None: the backend has no pools.

        tokens  that all sequences may hold together, at least one whole context; None: `capacity` each

        `Step.slots` names the sequence of each row of a step over the pool.
        """
        return None

    # -- experts that are read while a model runs ---------------------------------------------------------------------

    def expert_bytes(self, form: ExpertForm) -> int:
        """Predict the bytes of an expert of this form in a slot. Raises BimetalError if experts are not streamed."""
        raise BimetalError(f"the {self.name} backend does not stream experts from files; mlx and numpy do")

    def expert_memory(self, forms: Mapping[int, ExpertForm], slots: Mapping[Hashable, int]) -> SlotMemory:
        """Allocate the given number of slots of each `ExpertForm.kind`, for layers whose experts have `forms`."""
        raise BimetalError(f"the {self.name} backend does not stream experts from files; mlx and numpy do")

    # -- predictions of memory, from types and shapes alone ----------------------------------------------------

    def held_bytes(self, *parts: Tensor) -> int:
        """Predict the bytes of `weight(*parts)`."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def held_expert_bytes(self, *parts: Tensor) -> int:
        """Predict the bytes of `expert_weight(*parts)`."""
        return self.held_bytes(*parts)

    def held_state_bytes(self, spec: Sequence[LayerSpec], tokens: int, rows: int) -> int:
        """Predict the bytes of a state of `spec` after `tokens` tokens have been read in steps of `rows`."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def held_pool_bytes(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int, rows: int) -> int:
        """Predict the bytes of a pool as `new_pool` makes it; without pools, of `slots` states of `capacity` tokens.

        rows  rows of a prefill step
        """
        return slots * self.held_state_bytes(spec, capacity, rows)

    def work_bytes(self, layers: Sequence[LayerSize], tokens: int, rows: int) -> int:
        """Predict the peak bytes beside weights and states while `tokens` tokens are read in steps of `rows`."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def decode_bytes(self, layers: Sequence[LayerSize], tokens: int, sequences: int) -> int:
        """Predict what layers take beside `work_bytes` where sequences of up to `tokens` tokens share steps."""
        return 0

    def logits_bytes(self, vocab: int, sequences: int) -> int:
        """Predict the bytes of logits in steps that decode `sequences` sequences, by one row each."""
        return 0

    def free_bytes(self) -> tuple[int, str]:
        """Return (bytes that weights, states and workspace may take on this machine now, what sets that limit)."""
        raise BimetalError(f"the {self.name} backend does not predict what a model takes")

    def free_by_device(self, layers: int) -> list[tuple[int, Sequence[int]]]:
        """Return of each device (free bytes, which of the layers 0 to `layers` - 1 it holds)."""
        return [(self.free_bytes()[0], range(layers))]

    # -- steps -------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, needed: slice | None = None) -> Array:
        """Return fn(state, step).

        A backend that captures graphs has one per (fn, state, bucket of rows), as long as fn lives: build fn once. It
        calls fn with a step of its own, which may be in device memory.

        needed  rows of the result that the caller needs; None: all
        """
        out = fn(state, step)
        return out if needed is None else out[needed]

    def computed(self, x: Array) -> Array:
        """Return x; a lazy backend computes it now, and not when its values are needed."""
        return x

    @abstractmethod
    def read(self, x: Array) -> np.ndarray:
        """Copy x to the host, floats as float32. Decoders call this, models never."""

    def read_all(self, *xs: Array) -> tuple[np.ndarray, ...]:
        """Copy each array to the host, after one wait for the device."""
        return tuple(self.read(x) for x in xs)

    @abstractmethod
    def peak_bytes(self) -> int:
        """Return the peak memory of this process in bytes: on the device, or resident if memory is shared."""

    @property
    def launches(self) -> int:
        """Return the number of kernels launched so far; 0 if the backend does not count them."""
        return 0

    @property
    def built(self) -> int | None:
        """Count the kernels compiled and graphs captured so far; steps that do either take longer than later ones.

        None if the backend does not count it.
        """
        return 0

    @property
    def waited(self) -> float | None:
        """Return the seconds for which the host has waited to read numbers; None if the backend does not count them."""
        return None

    def count_idle(self) -> Callable[[], float] | None:
        """Begin to measure how long the device waits for the host between steps; None if the backend cannot.

        Returns a function that returns the mean seconds per step so far.
        """
        return None

    def copy_bandwidth(self) -> float:
        """Measure a large copy in the memory of the weights: bytes per second, read and written bytes counted."""
        source = np.ones(2**27, np.uint8)
        target = np.empty_like(source)
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            np.copyto(target, source)
            best = min(best, time.perf_counter() - started)
        return 2 * source.nbytes / best
