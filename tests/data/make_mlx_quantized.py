"""Write tests/data/mlx_quantized.npz: packed weights in every MLX mode, and what mlx.core.dequantize makes of them.

Made with mlx 0.32.4 on the CPU. Three rows each: all bits clear, all bits set, random; scales are float32 or bytes.
"""

from pathlib import Path

import mlx.core as mx
import numpy as np

WIDTH = 128
MODES = [("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MODES += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]


def make() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    arrays = {}
    for mode, bits, group in MODES:
        packed = random.integers(0, 1 << 32, (3, WIDTH * bits // 32), dtype=np.uint32)
        packed[0], packed[1] = 0, 0xFFFFFFFF
        shape = (3, WIDTH // group)
        parts = {"packed": packed}
        if mode == "affine":
            parts["scales"] = (random.standard_normal(shape) * np.exp(4 * random.standard_normal(shape))).astype("f4")
            parts["biases"] = random.standard_normal(shape).astype("f4")
        else:
            parts["scales"] = random.integers(0, 256, shape, dtype=np.uint8)
            parts["scales"][2, :4] = 0, 1, 127, 255
        parts["values"] = mx.dequantize(
            *(mx.array(parts[key]) for key in parts), group_size=group, bits=bits, mode=mode, dtype=mx.float32
        )
        arrays |= {f"{mode}-{bits}-{group}-{key}": np.array(part) for key, part in parts.items()}
    return arrays


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    np.savez_compressed(Path(__file__).with_name("mlx_quantized.npz"), **make())
