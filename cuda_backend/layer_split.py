"""Pipeline parallelism: a model's layers are split over several GPUs, and the rows of a step pass from GPU to GPU.

An op runs on the GPU of its weight or state, or without one on that of its first array; other arrays are copied there.
`scope` copies the residual rows to the GPU of the layer. A captured step is one graph per range of layers on one GPU.
It never waits for the host, so that the first GPU can run a step of other sequences while the next GPU runs this one:
`micro_batches`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np

from common.errors import BimetalError, UsageError
from common.ops import Ops
from common.step import Step
from common.storage import LayerSpec
from common.tensors import Tensor
from cuda_backend import rows
from cuda_backend.arrays import Array
from cuda_backend.multi_gpu_states import MultiGpuPool
from cuda_backend.ops import CudaOps
from cuda_backend.relay import Gpu, Input, MultiGpuStep, OnGpu, Relay, Value
from cuda_backend.several_gpus import SeveralGpus, check_devices, connect, each, free, leaves

# -- the ops -----------------------------------------------------------------------------------------------------------


def forwarded(name: str) -> Any:
    """Make the op `name`, which runs on the GPU that its arguments choose."""

    def op(self: "LayerSplitOps", *args: Any, **options: Any) -> Any:
        gpu = gpu_of(list(leaves(args)))
        args = each(args, lambda x: self.relay.bring(x, gpu) if isinstance(x, Value) else x)
        with self.relay.on(gpu) as ops:
            given = {key: each(x, lambda x: self._local(x, gpu)) for key, x in options.items()}
            return self._values(getattr(ops, name)(*each(args, lambda x: self._local(x, gpu)), **given), gpu)

    return op


def gpu_of(args: Sequence[Any]) -> Gpu:
    """Find the GPU of the first weight or state among `args`, or without one that of the first array."""
    return next(x.gpu for kind in (OnGpu, Value) for x in args if isinstance(x, kind))


class LayerSplitOps(SeveralGpus):
    """The op contract on several GPUs, each of which holds some layers.

    layers  index into `gpus` for each layer of the model
    draft   index of the GPU that holds the layers of a draft
    """

    def __init__(self, gpus: Sequence[Gpu], layers: Sequence[int], draft: Gpu):
        super().__init__(gpus)
        self.layers, self.draft = [gpus[i] for i in layers], draft
        self.micro_batches = len({*self.layers})
        self.relay = Relay(gpus)
        self.loads_on = gpus[0]
        for a in gpus:
            for b in gpus:
                if a is not b:
                    connect(a.index, b.index)

    def _place(self, layer: int) -> Gpu:
        return self.layers[layer] if layer < len(self.layers) else self.draft

    # -- weights and states --------------------------------------------------------------------------------------------

    @contextmanager
    def loading_layer(self, layer: int) -> Iterator[None]:
        self.loads_on = self._place(layer)
        with self.loads_on.ops.loading_layer(layer):
            yield

    def weight(self, *parts: Tensor) -> OnGpu:
        with self.loads_on.device:
            return OnGpu(self.loads_on.ops.weight(*parts), self.loads_on)

    def expert_weight(self, *parts: Tensor) -> OnGpu:
        with self.loads_on.device:
            return OnGpu(self.loads_on.ops.expert_weight(*parts), self.loads_on)

    def vector(self, tensor: Tensor) -> OnGpu:
        with self.loads_on.device:
            return OnGpu(self.loads_on.ops.vector(tensor), self.loads_on)

    def weight_bytes(self, weight: OnGpu) -> int:
        return weight.gpu.ops.weight_bytes(weight.value)

    def held_pool_bytes(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int, rows: int) -> int:
        return self.gpus[0].ops.held_pool_bytes(spec, slots, capacity, tokens, rows, self._batches(slots))

    def free_bytes(self) -> tuple[int, str]:
        return sum(map(free, self.gpus)), f"free memory of GPUs {', '.join(str(gpu.index) for gpu in self.gpus)}"

    def free_by_device(self, layers: int) -> list[tuple[int, Sequence[int]]]:
        held = [(gpu, [i for i in range(layers) if self._place(i) is gpu]) for gpu in self.gpus]
        return [(free(gpu), own) for gpu, own in held if own]

    def new_pool(self, spec: Sequence[LayerSpec], slots: int, capacity: int, tokens: int | None = None) -> MultiGpuPool:
        pools, layers = {}, [SimpleNamespace() for _ in spec]
        for gpu in self.gpus:
            own = [i for i in range(len(spec)) if self._place(i) is gpu]
            with gpu.device:
                part = gpu.ops.new_pool([spec[i] for i in own], slots, capacity, tokens, self._batches(slots))
            for n, i in enumerate(own):
                layers[i] = SimpleNamespace(**{name: OnGpu(handle, gpu) for name, handle in vars(part[n]).items()})
            pools[gpu] = part
        return MultiGpuPool(pools, layers)

    def _batches(self, slots: int) -> int:
        """Return the number of micro-batches into which a pool of `slots` sequences may be divided."""
        return min(slots, self.micro_batches)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def run(self, fn: Callable[[Any, Any], Any], state: Any, step: Step, needed: slice | None = None) -> Any:
        out, count = self.relay.run(fn, state, step), len(step)
        if isinstance(out, tuple):
            return tuple(self._out_of_arena(x, count) for x in out)
        return self._out_of_arena(out if needed is None else out[needed], count)

    def scope(self, layer: int, block: Callable[[Any], Any], x: Value) -> Value:
        gpu = self._place(layer)
        array = self.relay.bring(x, gpu)
        with self.relay.on(gpu) as ops:
            return ops.scope(layer, block, Value(array, gpu, self.relay))

    def read(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ndarray):
            return x
        with x.gpu.device:
            return x.gpu.ops.read(x.array)

    def read_all(self, *xs: Any) -> tuple[np.ndarray, ...]:
        if len({getattr(x, "gpu", None) for x in xs}) > 1:
            return super().read_all(*xs)
        with xs[0].gpu.device:
            return xs[0].gpu.ops.read_all(*(x.array for x in xs))

    def copy_bandwidth(self) -> float:
        """Return the bandwidth of the slowest GPU."""
        return min(self.each_gpu(lambda gpu: gpu.ops.copy_bandwidth()))

    embed = forwarded("embed")
    linear = forwarded("linear")
    head_linear = forwarded("head_linear")
    rms_norm = forwarded("rms_norm")
    rope = forwarded("rope")
    norm_rope = forwarded("norm_rope")
    gated_rms_norm = forwarded("gated_rms_norm")
    add = forwarded("add")
    swiglu = forwarded("swiglu")
    geglu = forwarded("geglu")
    scale = forwarded("scale")
    mul_sigmoid = forwarded("mul_sigmoid")
    mul_softplus = forwarded("mul_softplus")
    attention = forwarded("attention")
    block_sparse_attention = forwarded("block_sparse_attention")
    latent_attention = forwarded("latent_attention")
    expanded_attention = forwarded("expanded_attention")
    write_kv = forwarded("write_kv")
    short_conv = forwarded("short_conv")
    block_conv = forwarded("block_conv")
    parent_rows = forwarded("parent_rows")
    gated_delta = forwarded("gated_delta")
    delta_mixer = forwarded("delta_mixer")
    route_softmax = forwarded("route_softmax")
    route_sigmoid = forwarded("route_sigmoid")
    moe = forwarded("moe")
    moe_ffn = forwarded("moe_ffn")
    keep = forwarded("keep")
    sample = forwarded("sample")
    top_k = forwarded("top_k")
    argmax_entropy = forwarded("argmax_entropy")
    run_chains = Ops.run_chains  # on the host: the tokens of a pass lie on the first GPU, its logits on the last
    run_greedy = Ops.run_greedy

    # -- inside --------------------------------------------------------------------------------------------------------

    def _local(self, x: Any, gpu: Gpu) -> Any:
        """Convert an argument to what the ops of `gpu` take."""
        if isinstance(x, OnGpu):
            return x.value
        if isinstance(x, MultiGpuStep):
            return self.relay.steps[gpu]
        return getattr(self.relay.steps[gpu], x.name) if isinstance(x, Input) else x

    def _values(self, out: Any, gpu: Gpu) -> Any:
        if isinstance(out, tuple):
            return tuple(self._values(x, gpu) for x in out)
        return Value(out, gpu, self.relay) if isinstance(out, Array) else out

    def _out_of_arena(self, x: Value, count: int) -> Value:
        with x.gpu.device:
            return Value(rows.out_of_arena(x.gpu.context, x.array, count), x.gpu, self.relay)


# -- which GPU has what ------------------------------------------------------------------------------------------------


def open_gpus(
    devices: Sequence[int],
    split: Sequence[float],
    draft: int | None,
    sizes: Callable[[Ops], Sequence[int]],
    make: Callable[[], CudaOps],
) -> Ops:
    """Open ops on the GPUs `devices`: see `cuda_backend.open_devices`."""
    chosen = [*devices, *([] if draft is None else [draft])]
    check_devices(devices, chosen)
    if len(set(chosen)) == 1:
        cupy.cuda.Device(devices[0]).use()
        return make()
    gpus = {index: Gpu(index, make) for index in dict.fromkeys(chosen)}
    holders = [gpus[index] for index in devices]
    layer_bytes = sizes(holders[0].ops)
    layers = shared_out(layer_bytes, split or [free(gpu) for gpu in holders])
    for place, gpu in enumerate(holders):
        need, room = sum(n for n, at in zip(layer_bytes, layers, strict=True) if at == place), free(gpu)
        if need > room:
            raise BimetalError(
                f"GPU {gpu.index} ({gpu.context.card.name}) has {room / 1e9:.1f} GB free, and its "
                f"{layers.count(place)} layers take {need / 1e9:.1f} GB; "
                "give it a smaller share of the split, or choose more GPUs"
            )
    return LayerSplitOps(list(gpus.values()), layers, gpus[devices[-1] if draft is None else draft])


def shared_out(sizes: Sequence[int], split: Sequence[float]) -> list[int]:
    """Assign layers of `sizes` bytes to shares: contiguous ranges, close to the proportions `split`, none empty."""
    if len(split) > len(sizes):
        raise UsageError(f"the model has {len(sizes)} layers, too few for {len(split)} GPUs")
    before = np.concatenate([[0], np.cumsum(sizes)])  # bytes of the layers before a cut
    targets = np.cumsum(split) / np.sum(split) * before[-1]
    cuts = [0]
    for number, target in enumerate(targets[:-1], 1):
        nearest = int(np.abs(before - target).argmin())
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - len(split) + number))
    cuts.append(len(sizes))
    return [number for number in range(len(split)) for _ in range(cuts[number], cuts[number + 1])]
