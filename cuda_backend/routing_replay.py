"""Replay a routing trace: router logits with which each row chooses the experts of its token in the trace."""

import numpy as np

from common.errors import BimetalError
from common.routing_trace import Trace
from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.launch import Stream, kernel
from cuda_backend.memory import Memory, upload


class Routing:
    """A trace on the device. Decode steps follow it; prefill steps, which read all experts, use the model's router.

    layers  the model's layers with experts, in order, once `open` has been called
    """

    def __init__(self, trace: Trace, stream: Stream, start: int = 0):
        """Take a trace, replayed from token `start` on; after its last token it begins again."""
        self.trace, self.stream, self.token = trace, stream, start
        self.layers: list[int] = []

    def open(self, layers: list[int], experts: int) -> None:
        """Copy the trace to the device, for a model of `experts` experts in each of `layers`. Raises BimetalError."""
        _, n, _ = self.trace.ids.shape
        if (n, self.trace.experts) != (len(layers), experts):
            theirs, ours = f"{n} layers of {self.trace.experts} experts", f"{len(layers)} of {experts}"
            raise BimetalError(f"the trace is of another model: it has {theirs}, and this model has {ours}")
        self.layers = layers
        self.ids = upload(np.ascontiguousarray(self.trace.ids, np.int32), self.stream)
        self.logits = Memory(4 * len(layers) * MAX_DECODE_ROWS * experts)

    def step(self, rows: int, T: int) -> None:
        """Make the logits of a step of `rows` tokens of the trace, padded to T rows."""
        tokens, layers, used = self.trace.ids.shape
        args = self.ids.address, tokens, self.token, T, layers, used, self.trace.experts, self.logits.address
        kernel("random", "routed")((T, layers), (256,), args, stream=self.stream)
        self.token = (self.token + rows) % tokens

    def logits_of(self, layer: int, T: int) -> Array:
        """Return the logits (T, experts) of a layer, for the step of the last call of `step`."""
        size = T * self.trace.experts
        return Array((T, self.trace.experts), self.logits.address + 4 * self.layers.index(layer) * size)
