"""Write common/codebooks.npz: the grids of ggml's IQ1, IQ2 and IQ3 block types, as the gguf package lists them.

Origin: ggml-common.h of https://github.com/ggml-org/llama.cpp (MIT), through gguf-py's `gguf.quants`.
"""

from pathlib import Path

import gguf
import numpy as np

TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")


def codebooks() -> dict[str, np.ndarray]:
    """Each type's grid: int8, (entries, values per entry)."""
    grids = {}
    for name in TYPES:
        type_ = getattr(gguf.quants, name)
        type_.init_grid()
        grids[name] = type_.grid.reshape(type_.grid_shape).astype(np.int8)
    return grids


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).parents[2] / "common" / "codebooks.npz", **codebooks())
