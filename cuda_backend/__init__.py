"""The CUDA backend: NVIDIA GPUs of compute capability 7.5 and newer, through CuPy and our own kernels.

To follow a step, read replay.py, segments.py, ops.py, rows.py and products.py, in this order.

Steps and graphs
    context.py            what every op receives: the GPU's properties, stream, arena, the step on the device
    replay.py             uploads a step; runs its ops, or replays the graph captured from them
    segments.py           a captured step: graphs, calls on the host, copies between GPUs
    runs.py               the adjacent rows of each sequence in a step
    tree_order.py         the order in which recurrent layers compute a tree's rows
    to_host.py            numbers that the host reads while later steps run

Ops
    ops.py                CudaOps, the op contract; its methods are the functions of the files below
    arrays.py             Array, an activation on the device
    lazy.py, fuse.py      row-wise ops, launched when their consumer is known; the consumers that compute them
    rows.py               norms, ropes, gates, sums, `linear`, `embed`
    products.py, gemm.py  products with a quantized matrix; products of many rows by cuBLAS
    attention.py          attention over cached keys and values; decode steps by flash decoding: split.cu and others
                          compute partial results for pieces of the past, pieces.cu adds these up
    block_sparse.py       attention that leaves out blocks of keys
    latent.py             latent attention
    recurrent.py          convolution and the gated delta rule
    mixture.py            routing, experts and their weighted sum
    expert_products.py    products in which each row has its own matrix
    sampling.py           sampling, argmax, top-k and entropy

Kernels and launches
    kernels/              CUDA C++, one file per kernel, and headers
    sources.py            the text of a kernel: its headers and its file
    prototypes.py         the types of a kernel's parameters, read from its text
    launch.py             compiles and launches kernels; streams and captured graphs
    cubin.py              compiles kernels that only compute capability 9.0 can run
    views.py              the structs by which a kernel reads and writes arrays
    layout.py             sizes that kernels and their launchers share
    card.py, occupancy.py the current GPU; shared memory and registers by compute capability

Memory, weights and states
    memory.py             allocations on the device, and the arena for the outputs of a step
    sizes.py              predicted workspace of a prompt
    host_memory.py        pinned memory of the host
    upload.py, staged.py  copies to the device: of weights while loading, of other large arrays
    background_copies.py  copies to the host while steps run
    weights.py            matrices in their block types
    states.py             a pool of slots for the states of sequences
    state_table.py        the store of each class of specs, and its predicted bytes
    caches/               what a pool holds: keys and values, windows, latents, recurrent states; pages and formats
    exact.py              the rows of a compressed cache that attention reads as uncompressed float16
    experts.py            hot experts in GPU memory, all experts in host memory
    hot_layers.py         the slots of hot experts, which kernels exchange
    expert_stacks.py      the experts in host memory, and the tables of their addresses

Several GPUs
    several_gpus.py       ops that are equal for both ways of sharing a model
    layer_split.py        each GPU has some layers
    relay.py              arrays tagged with their GPU, and steps that pass from GPU to GPU
    tensor_parallel.py    each GPU has a part of every layer
    per_rank.py           values of tensor parallelism, once per GPU
    transports.py         chooses how ranks exchange rows:
    exchange.py           by our kernels, through each other's memory
    nccl_exchange.py      by NCCL
    multi_gpu_states.py   states on several GPUs
    processes.py          each GPU in a process of its own, on one machine or several

Benchmarks
    idle.py               time in which a GPU waits between two steps
    random_weights.py     CudaOps with random weights
    routing_replay.py     logits that repeat a recorded routing
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.group import Launch
from common.hot_experts import HotExperts
from common.ops import Ops
from common.routing_trace import Trace

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def find_card() -> str:
    """Describe the GPUs, by number if there are several; raises BimetalError with what the current one lacks."""
    try:
        import cupy

        from cuda_backend.card import available, card_of
    except ImportError as error:
        raise BimetalError(f"CuPy does not load: {error}") from None
    from cuda_backend.launch import check_compiler

    available()
    check_compiler()
    cards = [card_of(i) for i in range(cupy.cuda.runtime.getDeviceCount())]
    words = [f"{card.name}, compute capability {card.capability / 10}" for card in cards]
    return words[0] if len(words) == 1 else "; ".join(f"GPU {i}: {text}" for i, text in enumerate(words))


def limit_memory(nbytes: int, devices: Sequence[int] = ()) -> None:
    """Let this process take at most `nbytes` of the memory of each of `devices`, by default the current GPU."""
    from cuda_backend.memory import limit

    limit(nbytes, devices)


def random_ops(experts: HotExperts | None = None, trace: Trace | None = None, start: int = 0) -> "CudaOps":
    """Open the current GPU for models whose quantized matrices are random: the GPU makes the matrices itself.

    experts  GPU memory for hot experts, while host memory holds all experts; None: all are in GPU memory
    trace    the routing that steps replay, from token `start` on; None: random routers choose
    """
    from cuda_backend.random_weights import RandomOps

    return RandomOps(experts, trace, start)


def open_ops(checkpoint: Checkpoint, exceeds_float16: bool = False, experts: HotExperts | None = None) -> "CudaOps":
    """Open the current GPU. Matrices keep the types stored in `checkpoint`; activations are always float32.

    experts  budget of hot experts in its memory; None: all experts are there
    """
    from cuda_backend.ops import CudaOps  # needs CuPy, which `layout` and the kernels do not

    return CudaOps(experts)


def open_devices(
    devices: Sequence[int],
    split: Sequence[float],
    draft: int | None,
    sizes: Callable[[Ops], Sequence[int]],
    random: bool = False,
) -> Ops:
    """Open the GPUs `devices`, which share layers in this order; a single one becomes the thread's current GPU.

    split   proportions of the model's bytes; empty: those of free memory
    draft   the GPU of a draft's layers; None: the last of `devices`
    sizes   given an Ops, returns the bytes of each layer of the model as these ops hold it
    random  make quantized matrices at random, as `random_ops` does
    """
    from cuda_backend.layer_split import open_gpus
    from cuda_backend.ops import CudaOps
    from cuda_backend.random_weights import RandomOps

    return open_gpus(devices, split, draft, sizes, RandomOps if random else CudaOps)


def open_tensor_parallel(devices: Sequence[int], sizes: Callable[[Ops], Sequence[int]], random: bool = False) -> Ops:
    """Open the GPUs `devices`, which share every layer of a model; the first one is rank 0.

    sizes   given an Ops, returns the bytes of a rank's part of each layer as these ops hold it
    random  make quantized matrices at random, as `random_ops` does
    """
    from cuda_backend.ops import CudaOps
    from cuda_backend.random_weights import RandomOps
    from cuda_backend.tensor_parallel import open_ranks

    return open_ranks(devices, sizes, RandomOps if random else CudaOps)


def open_process(
    launch: Launch, sizes: Callable[[Ops], Sequence[int]], facts: Mapping[str, object], memory: int | None = None
) -> Ops:
    """Open this process's GPU, which shares every layer of a model with the GPUs of other processes.

    sizes   given an Ops, returns the bytes of this rank's part of each layer
    facts   what must be equal in all processes, as in Group.agree
    memory  limit in bytes of what this process takes of its GPU; None: free memory
    """
    from cuda_backend.ops import CudaOps
    from cuda_backend.processes import open_rank, own_device

    if memory is not None:
        limit_memory(memory, [own_device(launch.local_rank)])
    return open_rank(launch, sizes, CudaOps, facts)
