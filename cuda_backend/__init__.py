"""CUDA: NVIDIA GPUs of compute capability 8.0 and newer, through CuPy and our own kernels."""

from typing import TYPE_CHECKING

from common.checkpoint import Checkpoint

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps


def open_ops(checkpoint: Checkpoint) -> "CudaOps":
    """The current GPU. Matrices stay in the types that `checkpoint` stores, activations are float32."""
    from cuda_backend.ops import CudaOps  # needs CuPy, which `layout` and the kernels do not

    return CudaOps()
