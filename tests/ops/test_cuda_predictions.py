"""The formula by which docs/cuda.md predicts cards that nobody has measured gives an H200's measured figures."""

import pytest

from common.models import ARCHITECTURES
from common.weights import Matrix
from cuda_backend.layout import UNITS
from cuda_backend.occupancy import CARDS, Planned
from generate.synthetic import synthetic_checkpoint

REACHED = 0.85  # of the specified bandwidth
KERNELS = {1: 549, 16: 597}  # of a step, by rows; before compute capability 9.0 48 more
EACH = {1: 1.5e-6, 16: 3.2e-6}  # seconds of a kernel beside reading, on an H200
PREFILL = 48.7e9  # FLOP per token


def weight_bytes() -> int:
    """Bytes of Qwen3.6-27B Q4_K_M that a step reads, in the layout on the device."""
    checkpoint = synthetic_checkpoint("qwen3.6-27b:q4_k_m")
    definition = ARCHITECTURES[checkpoint.config["general.architecture"]]
    layout = definition.layout(definition.read_config(checkpoint), checkpoint)
    matrices = [
        checkpoint.tensors[part.names[0]]
        for table in (layout.top, *layout.layers)
        for name, entry in table.items()
        if isinstance(entry, Matrix) and name != "embed"
        for part in entry.parts
    ]
    total = 0
    for tensor in matrices:
        rows, columns = tensor.shape
        if tensor.type in UNITS:
            k, tile = UNITS[tensor.type]
            total += -(-rows // 128) * -(-columns // k) * 8 * tile
        else:
            total += tensor.nbytes
    return total


def step(planned: Planned, rows: int) -> tuple[float, float]:
    """Milliseconds of reading, and of everything else."""
    kernels = KERNELS[rows] + (48 if planned.card.capability < 90 else 0)
    return weight_bytes() / (REACHED * planned.bandwidth) * 1e3, kernels * EACH[rows] * 1e3


def test_measured():
    """Qwen3.6-27B Q4_K_M on an H200 was measured at 218 tok/s, 5.65 ms for 16 rows, 10,330 prefill tok/s."""
    planned = next(p for p in CARDS if p.card.name == "H200")
    assert 1e3 / sum(step(planned, 1)) == pytest.approx(218, rel=0.05)
    assert sum(step(planned, 16)) == pytest.approx(5.65, rel=0.05)
    assert planned.flops / 2 / PREFILL == pytest.approx(10330, rel=0.05)
