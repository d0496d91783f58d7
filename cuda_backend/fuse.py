"""Table of fusions: ops that a consumer computes in its own launch, instead of reading their written result."""

from collections.abc import Callable
from typing import NamedTuple

from cuda_backend.arrays import Array
from cuda_backend.layout import Packing, packed_size
from cuda_backend.lazy import Lazy, Target, lazy_of
from cuda_backend.views import float4_aligned


class Fusion(NamedTuple):
    """Row of the table: `consumer` computes `producer` in its own launch if `holds(producer)`.

    kernel    file and function of the launch that computes both
    computed  fuse even if the producer's float32 rows exist already, which computes them twice
    """

    consumer: str
    producer: str
    kernel: str
    holds: Callable[[Lazy], bool] = lambda producer: True
    computed: bool = False


def _of_128(norm: Lazy) -> bool:
    """Test whether a launch can divide the rows of a norm into 128 columns each, and read its input in fours."""
    if norm.K % 128:
        return False
    (x,) = norm.inputs
    added = fused("norm", x)
    if not added:
        return float4_aligned(x)
    first, second = added.inputs
    return float4_aligned(first) if fused("norm of a sum", second) else float4_aligned(first, second)


def _experts_aligned(experts: Lazy) -> bool:
    y, _, *other = experts.inputs
    return float4_aligned(y, *other)


def _part_aligned(summed: Lazy) -> bool:
    return float4_aligned(*summed.inputs)


def _alone(experts: Lazy) -> bool:
    """Test whether nothing else is added to the sum of the experts yet."""
    return len(experts.inputs) == 2


def _of_128_channels(attention: Lazy) -> bool:
    return bool(attention.parameters.head % 128 == 0)


def _ungated(heads: Lazy) -> bool:
    return heads.parameters.gate is None


def _rope_alone(heads: Lazy) -> bool:
    return _ungated(heads) and not heads.parameters.norm


def _of_a_vector(added: Lazy) -> bool:
    """Test whether the same row is added to every row, in fours."""
    vector = added.inputs[1]
    return vector.strides[0] == 0 and vector.address % 16 == 0


FUSIONS = (
    Fusion("norm", "add", "rows.cu add_norm, light.cu add_scale"),
    Fusion("norm of a sum", "experts", "moe.cu combine_scale", _experts_aligned),
    Fusion("norm of a sum", "sum over GPUs", "exchange_norm.cu exchange_scale", _part_aligned),
    Fusion("add", "experts", "moe.cu combine", _alone),
    Fusion("gate", "attention", "pieces.cu combine", _of_128_channels),
    Fusion("cache", "heads", "to_cache.cu to_cache, heads_to_cache.cu heads_to_cache", _ungated, computed=True),
    Fusion("biased cache", "add", "to_cache.cu to_cache, heads_to_cache.cu heads_to_cache", _of_a_vector),
    Fusion("latent cache", "heads", "latent.cu gather", _rope_alone),
    Fusion("latent cache", "norm", "latent.cu gather"),
    Fusion("product", "norm", "light.cu add_scale, moe.cu combine_scale", _of_128, computed=True),
)


def fused(consumer: str, x: Array) -> Lazy | None:
    """Return the op that produces x if `consumer` computes it by the table above; None: `consumer` reads x."""
    lazy = lazy_of(x)
    return lazy if lazy and _holds(consumer, lazy) else None


def _holds(consumer: str, producer: Lazy) -> bool:
    for row in FUSIONS:
        if (row.consumer, row.producer) == (consumer, producer.op.name):
            return (row.computed or not producer.forms.dense) and row.holds(producer)
    return False


def packed_for_product(x: Lazy, packing: Packing) -> tuple[int, int]:
    """Return the addresses of x as int8 rows for a product, and of sums of squares of x (lazy.Op.emit_deferred).

    If x is a norm that the product can finish, the rows lack the factor 1 / rms, which the product computes from the
    sums. For any other x the rows are complete, and the address of the sums is 0.
    """
    if packing not in x.forms.deferred and x.op.emit_deferred and _holds("product", x):
        take = x.context.arena.take
        packed, squares = take(packed_size(x.K, x.T, packing)), take(x.T * -(-x.K // 128) * 4)
        x.op.emit_deferred(x, Target(packed=packed, packing=packing), squares)
        x.forms.deferred[packing] = packed, squares
    return x.forms.deferred.get(packing) or (x.as_packed(packing), 0)


def dense_for_product(x: Lazy) -> tuple[int, int]:
    """Return the same as `packed_for_product` with rows in float32, for a router; the launch also writes int8 rows."""
    rows = Packing(1, False)  # for types summed in integers; experts of other types request another form
    if not x.forms.deferred_dense and x.op.emit_deferred and _holds("product", x):
        take = x.context.arena.take
        packed = take(packed_size(x.K, x.T, rows))
        dense, squares = take(x.T * x.K * 4), take(x.T * -(-x.K // 128) * 4)
        x.op.emit_deferred(x, Target(dense=dense, packed=packed, packing=rows), squares)
        x.forms.deferred_dense, x.forms.deferred[rows] = dense, (packed, squares)
    if x.forms.deferred_dense:
        return x.forms.deferred_dense, x.forms.deferred[rows][1]
    return x.as_dense(), 0
