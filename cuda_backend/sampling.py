"""The way out of a step: a token by argmax or by chance, or the best tokens of a row; logits stay on the device."""

import math
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np

from common.ops import Ops
from common.sampling import ONE, Sampler
from common.step import MAX_DECODE_ROWS
from cuda_backend import weights
from cuda_backend.arrays import Array
from cuda_backend.launch import kernel
from cuda_backend.memory import Memory

if TYPE_CHECKING:
    from cuda_backend.ops import CudaOps

DRAW_BINS = 2048  # kernels/draw.cu BINS
MOST_BEST = 64  # tokens of a row that kernels/top_k.cu finds
CTA_KEYS = 4096  # and what one of its CTAs chooses from


def sample(ops: "CudaOps", logits: Array, sampler: Sampler) -> Any:
    if not ops.chooses(sampler):
        return np.array([sampler.pick(row) for row in ops.read(logits)], np.int32)
    T = logits.shape[0]
    best, keys = _best(ops, logits)
    memory = Memory(T * 4)
    tokens = Array((T,), memory.address, owner=(memory, keys), dtype=np.int32)
    if not sampler.is_argmax:
        tokens.owner = memory, keys, _draw(ops, logits, best, sampler, tokens.address)
        return tokens
    next_step = ops.replay.small.place_for(tokens) if T <= MAX_DECODE_ROWS else tokens.address
    args = (*best, np.uint64(tokens.address), np.uint64(next_step))
    kernel("sample", "final")((T,), (32,), args, stream=ops.stream)
    return tokens


def _best(ops: "CudaOps", logits: Array) -> tuple[tuple[Any, ...], Memory | None]:
    """The largest keys of pieces of each row: where they are, how many, and their memory if it is not the logits'."""
    if logits.best:
        return (np.uint64(logits.best), np.int32(pieces_of(logits.shape[1]))), None
    T, V = logits.shape
    pieces = min(64, -(-V // 256))
    memory = Memory(T * pieces * 8)
    args = np.uint64(logits.address), np.int32(V), np.uint64(memory.address)
    kernel("sample", "partial")((pieces, T), (256,), args, stream=ops.stream)
    return (args[2], np.int32(pieces)), memory


def pieces_of(V: int) -> int:
    """Keys of a row that kernels/sample.cu add_up leaves."""
    return -(-V // 1024)


def top_k(ops: "CudaOps", logits: Array, k: int) -> tuple[Array, Array]:
    T, V = logits.shape
    k, pieces = min(k, V), max(-(-V // CTA_KEYS), min(64, -(-V // 256)))
    if k > MOST_BEST or pieces * k > CTA_KEYS:
        return Ops.top_k(ops, logits, k)
    memory = Memory(T * (pieces * (8 * k + 8) + 8 * k))
    sums = memory.address + T * pieces * 8 * k
    ids = sums + T * pieces * 8
    out = [Array((T, k), ids + i * T * k * 4, owner=memory, dtype=t) for i, t in enumerate((np.int32, np.float32))]
    keys = np.uint64(memory.address), np.uint64(sums)
    args = (np.uint64(logits.address), np.int32(V), np.int32(k), *keys)
    kernel("top_k", "partial")((pieces, T), (256,), args, stream=ops.stream)
    last = (*keys, np.int32(pieces), np.int32(k), np.uint64(out[0].address), np.uint64(out[1].address))
    kernel("top_k", "final")((T,), (256,), last, stream=ops.stream)
    return out[0], out[1]


def _draw(ops: "CudaOps", logits: Array, best: tuple[Any, ...], sampler: Sampler, tokens: int) -> Memory:
    """Sampler.pick of each row, `best` its best keys by pieces. Returns memory that must last until it has run."""
    s, (T, V) = sampler.sampling, logits.shape
    cut = s.top_k > 0 or s.top_p < 1
    memory = Memory(8 * T * (V + 1 + 2 * DRAW_BINS * cut))
    uniform = memory.address + 8 * T * V
    chances, bins = np.uint64(memory.address), np.uint64(uniform + 8 * T)
    weights.copy_in(uniform, sampler.numbers(T), ops.stream)
    if cut:
        cupy.cuda.runtime.memsetAsync(int(bins), 0, 16 * T * DRAW_BINS, ops.stream.ptr)
    head = np.uint64(logits.address), np.int32(V), *best
    args = (*head, np.float64(s.temperature), np.int32(cut), chances, bins)
    kernel("draw", "weigh")((min(256, -(-V // 256)), T), (256,), args, stream=ops.stream)
    limits = np.int32(min(s.top_k, V)), np.float64(s.top_p), np.uint64(max(1, math.ceil(s.min_p * ONE)))
    args = (*head, chances, bins, *limits, np.uint64(uniform), np.uint64(tokens))
    kernel("draw", "draw")((T,), (1024,), args, stream=ops.stream)
    return memory
