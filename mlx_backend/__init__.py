"""The MLX backend: Apple Silicon's GPU through Metal, any CPU, or a GPU that MLX's build supports."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from common.checkpoint import Checkpoint
from mlx_backend.ops import MlxOps
from mlx_backend.weights import stored_dtype

if TYPE_CHECKING:
    from mlx_backend.following import GroupOps


def open_ops(checkpoint: Checkpoint, exceeds_float16: bool = False) -> MlxOps:
    """Open MlxOps on MLX's default device, in float32 on the CPU, on a GPU in the type of most bytes of `checkpoint`.

    exceeds_float16  whether the model's activations exceed 65504: bfloat16 then replaces float16
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return MlxOps(mx.float32)  # MLX multiplies float16 groups 40 times slower there
    return MlxOps(stored_dtype(checkpoint.tensors.values(), exceeds_float16))


def open_shared(
    checkpoint: Checkpoint,
    exceeds_float16: bool,
    needs: Callable[[MlxOps], tuple[list[int], int, int]],
    facts: Mapping[str, object],
    tensor: bool = False,
) -> "GroupOps":
    """Open the ops of this process in a group that mlx.launch has started.

    needs   returns, given the ops, the bytes of each layer, the numbers of a row between layers, and the memory to use
    facts   what must be equal on all ranks, as in Group.agree
    tensor  whether all processes share each layer; else each process has some of the layers
    """
    from mlx_backend.group import Group
    from mlx_backend.pipeline import PipelineOps
    from mlx_backend.tensor_parallel import TensorOps

    dtype, group = open_ops(checkpoint, exceeds_float16).dtype, Group()
    group.agree({**facts, "the float type": dtype, "the version of MLX": version("mlx")})
    ops: PipelineOps | TensorOps = TensorOps(dtype, group) if tensor else PipelineOps(dtype, group)
    sizes, hidden, memory = needs(ops)
    if isinstance(ops, TensorOps):
        ops.fit(sizes, memory)
    else:
        ops.share(sizes, hidden, memory)
    return ops


def load_fallback(checkpoint: Checkpoint, ops: MlxOps) -> Any:
    """Load a checkpoint whose architecture only mlx-lm defines, through mlx-lm."""
    from mlx_backend.fallback import FallbackModel

    return FallbackModel(checkpoint, ops)


def mlx_lm_tokens(folder: Path, prefill_rows: int) -> Callable[[np.ndarray, int], Iterator[Any]]:
    """Run mlx-lm's own greedy loop over a safetensors folder, to time it beside ours."""
    from mlx_backend.peer import mlx_lm_tokens

    return mlx_lm_tokens(folder, prefill_rows)
