"""MLX: Apple Silicon's GPU through Metal, any CPU, or a GPU that a build of MLX is for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from common.checkpoint import Checkpoint
from mlx_backend.ops import MlxOps
from mlx_backend.weights import stored_dtype


def open_ops(checkpoint: Checkpoint, wide: bool = False) -> MlxOps:
    """MlxOps on MLX's default device: float32 on the CPU, on a GPU the type in which `checkpoint` stores most bytes.

    wide  True where the model's activations exceed 65504: bfloat16 then replaces float16
    """
    if mx.default_device().type == mx.DeviceType.cpu:
        return MlxOps(mx.float32)  # MLX multiplies float16 groups 40 times slower there
    return MlxOps(stored_dtype(checkpoint.tensors.values(), wide))


def load_fallback(checkpoint: Checkpoint, ops: MlxOps) -> Any:
    """Load a checkpoint whose architecture only mlx-lm defines, through mlx-lm."""
    from mlx_backend.fallback import FallbackModel

    return FallbackModel(checkpoint, ops)


def mlx_lm_tokens(folder: Path, prefill_rows: int) -> Callable[[np.ndarray, int], Iterator[Any]]:
    """Run mlx-lm's own greedy loop over a safetensors folder, to time it beside ours."""
    from mlx_backend.peer import mlx_lm_tokens

    return mlx_lm_tokens(folder, prefill_rows)
