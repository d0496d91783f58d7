"""GGUF blocks on Metal: the decoder's bits, products, experts, and rows that do not depend on their neighbours."""

from dataclasses import replace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from common.expert_forms import ExpertForm, Streamed
from common.quants import BLOCKS, dequantize
from common.reference import NumpyOps
from common.tensors import Tensor
from mlx_backend import kernels, quantized
from mlx_backend.ops import MlxOps
from mlx_backend.weights import Packed

metal = pytest.importorskip("simt.device", exc_type=ImportError)
TYPES = pytest.mark.parametrize("type_", quantized.HALVES)
TOLERANCE = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}  # of the largest product: its rounding


def stored(type_: str, *shape: int) -> Tensor:
    """Random blocks; their scales and minima lie between 2^-7 and 2^-5."""
    random, block = np.random.default_rng(sum(shape)), BLOCKS[type_]
    data = random.integers(0, 256, (*shape[:-1], shape[-1] // block.elements, block.bytes), np.uint8)
    for at in block.halves:
        data[..., at : at + 2] = random.uniform(2**-7, 2**-5, data.shape[:-1]).astype("<f2")[..., None].view(np.uint8)
    return Tensor(type_, type_, shape, data.reshape(*shape[:-1], -1))


def rows(T: int, columns: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(T).standard_normal((T, columns)).astype(np.float32)).astype(dtype)


def assert_close(ours: mx.array, x: mx.array, weight: np.ndarray) -> None:
    want = np.asarray(x.astype(mx.float32)) @ weight.swapaxes(-1, -2)
    off = np.abs(np.asarray(ours.astype(mx.float32)) - want).max()
    assert ours.dtype == x.dtype
    assert off <= TOLERANCE[x.dtype] * np.abs(want).max()


@TYPES
@pytest.mark.few(4)
def test_weights_have_the_bits_of_the_decoder(type_):
    one, two = stored(type_, 2, 3, 512), stored(type_, 2, 1, 512)
    want = np.concatenate([dequantize(one), dequantize(two)], axis=1)
    weight = quantized.load_blocks([one, two])
    assert weight.shape == (2, 4, 512)
    assert sum(a.nbytes for a in weight[:2]) == one.nbytes + two.nbytes
    with metal.on_metal():
        assert np.array_equal(quantized.dequantize(weight, mx.float32), want)
        picked = quantized.dequantize(weight.take(mx.array([1])), mx.bfloat16)
    assert mx.array_equal(picked, mx.array(want[1:]).astype(mx.bfloat16))


@TYPES
@pytest.mark.few(4)
def test_a_row_does_not_depend_on_the_rows_beside_it(type_):
    """One row alone and among 2 to 8; one among 9 and among up to 64."""
    tensor = stored(type_, 6, 256)
    weight, x = quantized.load_blocks([tensor]), rows(64, 256)
    with metal.on_metal():
        vectors = mx.concatenate([quantized.matmul(x[t : t + 1], weight) for t in range(3)])
        matrices = quantized.matmul(x[:9], weight)
        for T in (1, 2, 3, 5, 8, 9, 17, 33, 64) if type_ == "Q6_K" else (3, 9):
            together, few = quantized.matmul(x[:T], weight), min(T, 3)
            assert mx.array_equal(together[:few], (vectors if T <= quantized.VECTORS else matrices)[:few])
            assert_close(together, x[:T], dequantize(tensor))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("type_", "N", "columns", "T"),
    [
        *[("IQ4_NL", 1, 32, 1), ("IQ4_NL", 5, 288, 2), ("Q6_K", 13, 768, 1), ("Q5_1", 3, 96, 2)],
        *[("IQ4_NL", 1, 32, 9), ("IQ4_NL", 70, 96, 24), ("Q6_K", 33, 768, 33), ("Q2_K", 17, 512, 11)],
    ],
)
@pytest.mark.few(8)
def test_shapes_and_types(type_, N, columns, T, dtype):
    """From a matrix too small for a device buffer to groups that are not full."""
    tensor, x = stored(type_, N, columns), rows(T, columns, dtype)
    with metal.on_metal():
        assert_close(quantized.matmul(x, quantized.load_blocks([tensor])), x, dequantize(tensor))


@pytest.mark.parametrize("T", [3, 12])
def test_rows_that_are_not_contiguous(T):
    tensor, x = stored("Q3_K", 4, 256), rows(T, 300)[:, 20:276]
    with metal.on_metal():
        assert_close(quantized.matmul(x, quantized.load_blocks([tensor])), x, dequantize(tensor))


def test_many_rows_take_decoded_weights(monkeypatch):
    monkeypatch.setattr(quantized, "DECODED", 2 * 256)  # two rows of weights at a time, the last one alone
    tensor, x = stored("Q6_K", 5, 256), rows(65, 256)
    with metal.on_metal():
        assert_close(quantized.matmul(x, quantized.load_blocks([tensor])), x, dequantize(tensor))


@TYPES
@pytest.mark.few(4)
def test_each_row_through_its_expert(type_):
    tensor, experts = stored(type_, 3, 5, 256), np.array([0, 0, 0, 2, 2, 1, 1, 1, 1, 2, 2])
    weight, x = quantized.load_blocks([tensor]), rows(len(experts), 256)
    with metal.on_metal():
        sorted_runs = quantized.gather_matmul(x, weight, mx.array(experts), True)
        one_by_one = quantized.gather_matmul(x[:4], weight, mx.array(experts[:4]), False)
        alone = quantized.matmul(x[3:4], quantized.load_blocks([tensor.take_rows(np.array([2]))]).take(0))
    want = np.stack([row @ dequantize(tensor)[e].T for row, e in zip(np.asarray(x), experts, strict=True)])
    assert np.abs(np.asarray(sorted_runs) - want).max() < 2e-6 * np.abs(want).max()
    assert mx.array_equal(sorted_runs[:4], one_by_one)
    assert mx.array_equal(sorted_runs[3:4], alone)


@pytest.mark.parametrize("type_", ["Q6_K", "IQ4_NL", "IQ2_XS"])
def test_experts_are_found_through_a_table_of_slots(type_):
    """The bits of the stack in order: for runs of rows of one expert, and for single rows."""
    tensor, experts = stored(type_, 3, 5, 256), mx.array([0, 0, 2, 2, 2, 1, 1, 1, 1])
    x, slots = rows(9, 256), mx.array([4, 1, 0, 99], dtype=mx.int32)
    held = quantized.new_blocks((6, 5, 256), type_)
    for e, slot in enumerate((4, 1, 0)):
        one = replace(tensor, shape=(5, 256), data=tensor.data[e])
        quantized.fill_blocks(one, np.asarray(held.words)[slot], np.asarray(held.halves)[slot])
    with metal.on_metal():
        for n, ordered in ((9, True), (3, False)):
            want = quantized.gather_matmul(x[:n], quantized.load_blocks([tensor]), experts[:n], ordered)
            assert mx.array_equal(quantized.gather_matmul(x[:n], held, experts[:n], ordered, slots), want)


@pytest.mark.parametrize("T", [2, 40])
@pytest.mark.long
def test_streamed_experts_have_the_bits_of_a_stack(T):
    """The whole op over slots that are filled expert by expert; of few rows and of rows sorted by slot."""
    gate_up, down, ops = stored("Q6_K", 3, 512, 256), stored("Q3_K", 3, 256, 256), MlxOps()
    x, random = rows(T, 256), np.random.default_rng(T)
    ids, weights = mx.array(random.integers(0, 3, (T, 2))), mx.array(random.random((T, 2)).astype(np.float32))
    table = np.array([4, 1, 0], np.int32)

    def expert(tensor: Tensor, e: int) -> Tensor:
        return replace(tensor, shape=tensor.shape[1:], data=tensor.data[e])

    with metal.on_metal():
        form = ExpertForm((expert(gate_up, 0),), (expert(down, 0),))
        memory = ops.expert_memory({0: form}, {form.kind: 5})
        for e, slot in enumerate(table):
            memory.landed(0, slot, [expert(gate_up, e), expert(down, e)])
        handles = [Streamed(lambda ids: table, lambda: None, parts, 0) for parts in memory.matrices(0)]
        assert [type(part) for handle in handles for part in handle.parts.weight] == [quantized.Blocks] * 2
        streamed = ops.moe(x, *handles, ids, weights)
        assert mx.array_equal(streamed, ops.moe(x, ops.weight(gate_up), ops.weight(down), ids, weights))
    assert memory.last is streamed


@TYPES
def test_the_backend_keeps_what_the_file_stores(type_):
    """`holds` and predicted sizes describe our Metal kernels on a Mac, and MLX's groups elsewhere."""
    tensor, ops = stored(type_, 7, 256), MlxOps(mx.float16)
    with metal.on_metal():
        weight = ops.weight(tensor, tensor)
        assert ops.holds(type_) == "as stored"
        assert ops.weight_bytes(weight) == ops.held_bytes(tensor, tensor) == 2 * tensor.nbytes
        rows_of_table = ops.embed(weight, np.array([9, 0], np.int32))
    assert mx.array_equal(rows_of_table, mx.array(dequantize(tensor)[[2, 0]]).astype(mx.float16))
    with mock.patch.object(kernels, "on_metal", return_value=False):
        assert ops.holds(type_).startswith(f"affine, {5 if type_ in ('Q5_0', 'Q5_1') else 8} bits")
        assert ops.weight_bytes(ops.weight(tensor)) == ops.held_bytes(tensor) >= tensor.nbytes


def test_parts_of_several_formats():
    """Neighbours of one type are one matrix; blocks as stored mix neither with each other nor with MLX's groups."""
    parts = [stored(type_, n, 256) for type_, n in (("Q6_K", 2), ("Q6_K", 3), ("Q3_K", 2), ("Q4_K", 2), ("Q5_K", 1))]
    ops, x = MlxOps(), rows(3, 256)
    with metal.on_metal():
        weight = ops.weight(*parts)
        ours = ops.linear(x, weight)
    assert [type(part) for part in weight] == [quantized.Blocks, quantized.Blocks, Packed, Packed]
    assert_close(ours, x, np.concatenate([dequantize(part) for part in parts]))


@pytest.mark.parametrize("T", [3, 40])
def test_experts_and_heads(T):
    """Experts of few and of many rows, and matrices by head, which are decoded whole."""
    gate_up, down, heads = stored("Q6_K", 3, 8, 256), stored("IQ4_NL", 3, 256, 32), stored("IQ4_NL", 3, 5, 64)
    gate_up = replace(gate_up, shape=(3, 64, 256), data=np.tile(gate_up.data, (1, 8, 1)))
    x = rows(T, 256)
    ids, weights = (np.arange(2 * T) * 5 % 3).reshape(T, 2), np.full((T, 2), 0.5, np.float32)
    results = []
    for ops in (MlxOps(), NumpyOps()):
        with metal.on_metal():
            a, b, c = ops.weight(gate_up), ops.weight(down), ops.weight(heads)
            inputs = [x, mx.array(ids), mx.array(weights)] if ops.name == "mlx" else [np.asarray(x), ids, weights]
            out = ops.moe(inputs[0], a, b, *inputs[1:])
            by_head = ops.head_linear(inputs[0][:, :192].reshape(T, 3, 64), c)
        results.append((np.asarray(out), np.asarray(by_head)))
    for ours, want in zip(*results, strict=True):
        assert np.abs(ours - want).max() < 3e-6 * np.abs(want).max()
