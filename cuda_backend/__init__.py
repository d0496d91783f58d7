"""CUDA: NVIDIA GPUs of compute capability 8.0 and newer, through CuPy and our own kernels."""

from typing import TYPE_CHECKING

from common.checkpoint import Checkpoint
from common.errors import BimetalError

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def find_card() -> str:
    """The current GPU in words; raises BimetalError with what is missing."""
    try:
        from cuda_backend.ops import available
    except ImportError as error:
        raise BimetalError(f"CuPy does not load: {error}") from None
    from cuda_backend.launch import check_compiler

    card = available()
    check_compiler()
    return f"{card.name}, compute capability {card.capability / 10}"


def random_ops() -> "CudaOps":
    """The current GPU, for models whose quantized matrices are random: it makes them itself."""
    from cuda_backend.random_weights import RandomOps

    return RandomOps()


def open_ops(checkpoint: Checkpoint, wide: bool = False) -> "CudaOps":
    """The current GPU. Matrices stay in the types that `checkpoint` stores; activations are float32, `wide` or not."""
    from cuda_backend.ops import CudaOps  # needs CuPy, which `layout` and the kernels do not

    return CudaOps()
