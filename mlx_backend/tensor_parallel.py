"""A model whose layers are all divided among the processes of a group: each rank holds some heads and channels.

All ranks run the whole step, and add up the results of their parts of a mixer and of a feed-forward network. Embedding,
norms, routers and head are on every rank, so that all have equal logits; rank 0 alone chooses tokens.
"""

from collections import deque
from collections.abc import Sequence

import mlx.core as mx

from common.errors import BimetalError
from common.ops import Array
from common.shards import Ranks
from mlx_backend.following import GroupOps
from mlx_backend.group import Group

LAST_SUMS = 4  # sums at the end of a step, on which its output may not depend: of rows that only a draft needs


class TensorOps(GroupOps):
    """The op contract on this process's heads and channels.

    Two ranks always add in the same order; more ranks on a ring add in an order that depends on the rows of the step.
    Sums differ from those of one process in the last bits.
    """

    sends_tokens = True

    def __init__(self, dtype: mx.Dtype, group: Group):
        super().__init__(dtype, group)
        self.ranks = Ranks(group.rank, group.size)
        self.joins = group.size == 2  # with more ranks a sum's order depends on the rows of the step
        self._sums: deque[mx.array] = deque(maxlen=LAST_SUMS)

    def fit(self, sizes: Sequence[int], memory: int) -> None:
        """Check that every rank has memory for its part; call it before weights are loaded.

        sizes   bytes of each layer's part, and of weights outside the layers
        memory  bytes that this rank gives to the model

        Raises BimetalError if a part does not fit.
        """
        given = self.group.gather(memory)
        least = min(range(len(given)), key=lambda rank: given[rank])
        if sum(sizes) > given[least]:
            raise BimetalError(
                f"the model needs {sum(sizes) / 1e9:.3g} GB on each of {len(given)} machines, and machine {least + 1} "
                f"gives {given[least] / 1e9:.3g} GB: add machines or memory, or choose a smaller quantization"
            )

    def all_reduce(self, x: Array) -> Array:
        if not x.size:
            return x
        self._sums.append(self.group.add_up(x))
        return self._sums[-1]

    def finished(self, out: Array) -> Array:
        """Return the output of a step, computed at once: the ranks wait for one another."""
        self.group.compute(out, *self._sums)
        self._sums.clear()
        return out
