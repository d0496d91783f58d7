"""The CUDA backend: NVIDIA GPUs of compute capability 7.5 and newer, through CuPy and our own kernels."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.hot_experts import HotExperts
from common.ops import Ops
from common.routing_trace import Trace

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def find_card() -> str:
    """The GPUs in words, by number if there are several; raises BimetalError with what the current one lacks."""
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
    """The current GPU, for models whose quantized matrices are random: it makes them itself.

    experts  memory that experts may take of the GPU, the others being in host memory; None: all are in GPU memory
    trace    the routing that steps replay, from token `start` on; None: random routers choose
    """
    from cuda_backend.random_weights import RandomOps

    return RandomOps(experts, trace, start)


def open_ops(checkpoint: Checkpoint, wide: bool = False, experts: HotExperts | None = None) -> "CudaOps":
    """The current GPU. Matrices stay in the types that `checkpoint` stores; activations are float32, `wide` or not.

    experts  what experts may take of its memory; None: all of them lie there
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
    """The GPUs `devices`, which share a model's layers in this order; a single one becomes the thread's current GPU.

    split   proportions of the model's bytes; empty: as memory is free
    draft   the GPU of a draft's layers; None: the last of `devices`
    sizes   bytes of each layer of the model, as given ops hold it
    random  make quantized matrices at random, as `random_ops` does
    """
    from cuda_backend.layer_split import open_gpus
    from cuda_backend.ops import CudaOps
    from cuda_backend.random_weights import RandomOps

    return open_gpus(devices, split, draft, sizes, RandomOps if random else CudaOps)


def open_tensor_parallel(devices: Sequence[int], sizes: Callable[[Ops], Sequence[int]], random: bool = False) -> Ops:
    """The GPUs `devices`, which share every layer of a model; the first one is rank 0.

    sizes   bytes of a rank's part of each layer, as given ops hold it
    random  make quantized matrices at random, as `random_ops` does
    """
    from cuda_backend.ops import CudaOps
    from cuda_backend.random_weights import RandomOps
    from cuda_backend.tensor_parallel import open_ranks

    return open_ranks(devices, sizes, RandomOps if random else CudaOps)
