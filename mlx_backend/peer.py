"""mlx-lm's model and decoding loop over a safetensors folder, which `bench` times for comparison."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from common.errors import BimetalError


def mlx_lm_tokens(folder: Path, prefill_rows: int) -> Callable[[np.ndarray, int], Iterator[Any]]:
    """Return a function of (prompt ids, count) to an iterator of greedy tokens, whose first next() reads the prompt."""
    try:
        from mlx_lm.generate import generate_step
        from mlx_lm.utils import load_model
    except ImportError:
        raise BimetalError("the peer mlx-lm is not installed: pip install mlx-lm") from None
    network = load_model(folder)[0]  # no tokenizer: the prompt is ids

    def tokens(prompt: np.ndarray, count: int) -> Iterator[Any]:
        return generate_step(mx.array(prompt), network, max_tokens=count, prefill_step_size=prefill_rows)

    return tokens
