"""A model whose layers are divided among the processes of a group: rows pass from rank to rank, and back to rank 0.

Rank 0 holds the embedding, the first layers, the last norm and the head; it alone knows tokens and chooses them. Each
follower holds the layers after those of the rank before it, and mirrors every state of rank 0 for them. Results are
bitwise those of one process, because a layer computes the same on every machine.
"""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from common.errors import BimetalError
from common.layer_shares import share_layers
from common.ops import Array, Weight
from common.step import State, Step
from common.storage import LayerSpec
from mlx_backend.following import GroupOps
from mlx_backend.group import Group


class PassedOnError(Exception):
    """Raised on a follower when its part of a step has been computed and sent to the next rank."""


class PipelineOps(GroupOps):
    """The op contract on this process's layers.

    hidden  hidden size
    own_layers  range of this rank's layers
    layers  number of layers of the whole model
    """

    def __init__(self, dtype: mx.Dtype, group: Group):
        super().__init__(dtype, group)
        self.hidden = self.layers = 0
        self.own_layers = range(0)
        self._rows = 0  # of the step's output

    def share(self, sizes: Sequence[int], hidden: int, memory: int) -> None:
        """Divide the layers by the memory of the ranks; call it before weights are loaded.

        sizes   bytes of each layer; weights outside the layers count to the first one
        memory  bytes that this rank gives to the model

        Raises BimetalError if the layers do not fit.
        """
        self.own_layers = share_layers(sizes, self.group.gather(memory))[self.group.rank]
        self.hidden, self.layers = hidden, len(sizes)

    def has_layer(self, layer: int | None) -> bool:
        return self.group.rank == 0 if layer is None else layer in self.own_layers

    def weight_bytes(self, weight: Weight | None) -> int:
        return 0 if weight is None else super().weight_bytes(weight)

    def own_spec(self, spec: Sequence[LayerSpec]) -> Sequence[LayerSpec]:
        if len(spec) != self.layers:
            raise BimetalError(f"a group of machines runs a model of {self.layers} layers without a draft")
        return [layer if i in self.own_layers else {} for i, layer in enumerate(spec)]

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[State, Step], Array], state: State, step: Step, needed: slice | None = None) -> Array:
        """Run a step as GroupOps.run; a follower returns nothing, because its part of the step ends before the head."""
        assert isinstance(fn, partial)
        self._rows = len(range(len(step))[fn.keywords["rows"]])
        try:
            return super().run(fn, state, step, needed)
        except PassedOnError:
            return mx.zeros((0,))

    def embed(self, table: Weight, tokens: Array) -> Array:
        return super().embed(table, tokens) if self.group.rank == 0 else mx.zeros((len(tokens), 0))

    def scope(self, layer: int, block: Callable[[Array], Array], x: Array) -> Array:
        """Run block(x) if the layer is this rank's; receive rows before its first layer, send them after its last."""
        if layer in self.own_layers:
            if self.group.rank and layer == self.own_layers.start:
                x = self.group.receive((len(x), self.hidden), self.dtype)
            x = block(x)
            if layer == self.own_layers.stop - 1 and self.group.size > 1:
                self.group.pass_on(x)
                if self.group.rank:
                    raise PassedOnError
        elif self.group.rank == 0 and layer == self.layers - 1:
            x = self.group.receive((self._rows, self.hidden), self.dtype)
        return x
