"""Slots of experts in MLX arrays: filled expert by expert, they hold the bits of the stack loaded at once."""

from dataclasses import replace

import numpy as np
import pytest
from test_mlx_weights import blocks

from common.expert_forms import ExpertForm, Streamed, components, filled
from common.quantize import encode_rows, mlx_format
from common.tensors import Tensor

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")

from mlx_backend.experts import MlxSlots, array_bits, bits, expert_bytes  # noqa: E402
from mlx_backend.ops import MlxOps  # noqa: E402
from mlx_backend.quantized import Blocks  # noqa: E402
from mlx_backend.weights import GGUF_MAPPING, Packed, load_matrix  # noqa: E402

E, SLOTS, ROWS, COLUMNS = 3, 5, 4, 256
WHERE = (4, 0, 2)  # slots of the experts


def floats(type_: str, rows: int) -> Tensor:
    values = np.random.default_rng(rows).standard_normal((E, rows, COLUMNS)).astype(np.float32)
    data = {"F32": values, "F16": values.astype(np.float16), "BF16": bits(values, mx.bfloat16)}[type_]
    return Tensor(type_, type_, values.shape, data.view(np.uint8).reshape(E, rows, -1))


def groups(type_: str, rows: int) -> Tensor:
    """MLX's groups with scales of a float type."""
    stored = floats(type_, rows).data
    encoded = encode_rows(stored.reshape(E * rows, -1), type_, mlx_format("affine", 4, 32), "weight")

    def part(name: str, data: np.ndarray) -> Tensor:
        return Tensor(name, type_, (E, rows, COLUMNS // 32), data.view(np.uint8).reshape(E, rows, -1))

    return Tensor(
        "weight",
        "affine",
        (E, rows, COLUMNS),
        encoded.data.view(np.uint8).reshape(E, rows, -1),
        part("scales", encoded.scales),
        part("biases", encoded.biases),
        4,
        32,
    )


def expert(tensor: Tensor, e: int) -> Tensor:
    parts = [replace(part, shape=part.shape[1:], data=part.data[e]) for part in components(tensor)]
    return replace(parts[0], **dict(zip(("scales", "biases"), parts[1:], strict=False)))


def arrays(part) -> list:
    return [array for array in part if isinstance(array, mx.array)] if isinstance(part, Packed | Blocks) else [part]


def assert_slots_hold(gate: Tensor, up: Tensor, down: Tensor, dtype: mx.Dtype) -> None:
    form = ExpertForm((expert(gate, 0), expert(up, 0)), (expert(down, 0),))
    memory = MlxSlots({7: form}, {form.kind: SLOTS}, dtype)
    for e, slot in enumerate(WHERE):
        buffers = memory.buffers(7, slot)
        for buffer, part in zip(buffers, (c for t in (gate, up, down) for c in components(expert(t, e))), strict=True):
            buffer[:] = part.data.reshape(-1)
        memory.landed(7, slot, filled(form.tensors, buffers))
    total = 0
    for slots, tensors in zip(memory.matrices(7), ((gate, up), (down,)), strict=True):
        for held, whole in zip(slots.weight, load_matrix(tensors, dtype), strict=True):
            for ours, theirs in zip(arrays(held), arrays(whole), strict=True):
                assert ours.dtype == theirs.dtype
                np.testing.assert_array_equal(array_bits(ours)[list(WHERE)], array_bits(theirs))
                total += ours.nbytes
    assert total == memory.nbytes == SLOTS * expert_bytes(form, dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("type_", ["F32", "F16", "BF16", "affine F32", "affine F16", "affine BF16", *GGUF_MAPPING])
def test_slots_hold_the_bits_of_a_stack(type_, dtype):
    def make(rows: int) -> Tensor:
        if type_.startswith("affine"):
            return groups(type_.split()[1], rows)
        return floats(type_, rows) if type_ in ("F32", "F16", "BF16") else blocks(type_, E, rows, COLUMNS)

    assert_slots_hold(make(ROWS), make(ROWS), make(2 * ROWS), dtype)


def test_parts_of_several_formats():
    gate, up = blocks("Q4_K", E, ROWS, COLUMNS), blocks("Q6_K", E, ROWS, COLUMNS)
    assert_slots_hold(gate, up, floats("BF16", ROWS), mx.bfloat16)


def test_rounding_to_bfloat16_is_that_of_mlx():
    values = np.random.default_rng(0).integers(0, 2**32, 10**5, dtype=np.uint64).astype(np.uint32).view(np.float32)
    ours, theirs = bits(values, mx.bfloat16), array_bits(mx.array(values).astype(mx.bfloat16))
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(ours[finite], theirs[finite])
    assert np.isnan((ours[~finite].astype(np.uint32) << 16).view(np.float32)).all()


def test_a_step_without_rows_computes_no_ids():
    """MLX's quantized product without rows, as that of such a router, would end the process."""

    def fetch(ids):
        raise AssertionError("the ids were computed")

    x, gate_up = mx.zeros((0, COLUMNS)), Streamed(fetch, lambda: None, None, 0)
    ids = mx.zeros((0, 3), mx.int32)
    assert MlxOps().moe(x, gate_up, gate_up, ids, mx.zeros((0, 3))).shape == (0, COLUMNS)
