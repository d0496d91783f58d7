"""Sampling, argmax, top-k and entropy of logits on the device; logits are not copied to the host."""

import math

import cupy
import numpy as np

from common.options import Sampling
from common.sampling import ONE, Sampler, Samplers
from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.launch import kernel
from cuda_backend.memory import Memory, copy_in
from cuda_backend.prototypes import DRAW
from cuda_backend.rows import pieces_of

DRAW_BINS = 2048  # kernels/draw.cu BINS
MOST_BEST = 64  # largest k of kernels/top_k.cu
CTA_KEYS = 4096  # logits per CTA of kernels/top_k.cu


def sample(context: Context, logits: Array, sampler: Sampler | Samplers) -> Array:
    """Choose a token of each row, int32 (T,), by `sampler`, or by the row's own sampler of several."""
    T, stream = logits.shape[0], context.stream
    best, keys = _best(context, logits)
    memory = Memory(T * 4, stream)
    tokens = Array((T,), memory.address, owner=(memory, keys), dtype=np.int32)
    if not sampler.is_argmax:
        if isinstance(sampler, Samplers):
            drawn = _draw_each(context, logits, best, sampler, tokens.address)
        else:
            drawn = _draw(context, logits, best, sampler, tokens.address)
        tokens.owner = memory, keys, drawn
        return tokens
    next_step = context.replay.small.place_for(tokens) if T <= MAX_DECODE_ROWS else tokens.address
    kernel("sample", "final")((T,), (32,), (*best, tokens.address, next_step), stream=stream)
    return tokens


def _best(context: Context, logits: Array) -> tuple[tuple[int, int], Memory | None]:
    """Return (address of the largest keys of pieces of each row, pieces, their memory if it is not the logits')."""
    if logits.best:
        return (logits.best, pieces_of(logits.shape[1])), None
    T, V = logits.shape
    pieces = min(64, -(-V // 256))
    memory = Memory(T * pieces * 8, context.stream)
    args = logits.address, V, memory.address
    kernel("sample", "partial")((pieces, T), (256,), args, stream=context.stream)
    return (memory.address, pieces), memory


def _pieces_of_best(V: int) -> int:
    return max(-(-V // CTA_KEYS), min(64, -(-V // 256)))


def finds(V: int, k: int) -> bool:
    """Test whether the kernels support the best k of V tokens."""
    return k <= MOST_BEST and _pieces_of_best(V) * k <= CTA_KEYS


def top_k(context: Context, logits: Array, k: int) -> tuple[Array, Array]:
    """The best k tokens of each row, int32 (T, k), and their log-probabilities, float32."""
    (T, V), stream = logits.shape, context.stream
    pieces = _pieces_of_best(V)
    memory = Memory(T * (pieces * (8 * k + 8) + 8 * k), stream)
    keys, sums = memory.address, memory.address + T * pieces * 8 * k
    ids = sums + T * pieces * 8
    out = [Array((T, k), ids + i * T * k * 4, owner=memory, dtype=t) for i, t in enumerate((np.int32, np.float32))]
    kernel("top_k", "partial")((pieces, T), (256,), (logits.address, V, k, keys, sums), stream=stream)
    last = keys, sums, pieces, k, out[0].address, out[1].address
    kernel("top_k", "final")((T,), (256,), last, stream=stream)
    return out[0], out[1]


def argmax_entropy(context: Context, logits: Array, excluded: int) -> tuple[Array, Array]:
    """The likeliest token but `excluded` of each row, int32 (T,), and the entropy without it, float32 (T,)."""
    (T, V), stream = logits.shape, context.stream
    pieces = _pieces_of_best(V)
    memory = Memory(T * (16 * pieces + 8), stream)
    keys, sums, ids = (memory.address + n * T for n in (0, 8 * pieces, 16 * pieces))
    out = [Array((T,), ids + 4 * i * T, owner=memory, dtype=t) for i, t in enumerate((np.int32, np.float32))]
    kernel("entropy", "partial")((pieces, T), (256,), (logits.address, V, excluded, keys, sums), stream=stream)
    kernel("entropy", "final")((T,), (32,), (keys, sums, pieces, out[0].address, out[1].address), stream=stream)
    return out[0], out[1]


def _draw(context: Context, logits: Array, best: tuple[int, int], sampler: Sampler, tokens: int) -> Memory:
    """Sampler.pick of each row, `best` its best keys by pieces. Returns memory that must last until it has run."""
    s, (T, V), stream = sampler.sampling, logits.shape, context.stream
    cut = s.top_k > 0 or s.top_p < 1
    memory = Memory(8 * T * (V + 1 + 2 * DRAW_BINS * cut), stream)
    uniform = memory.address + 8 * T * V
    chances, bins = memory.address, uniform + 8 * T
    copy_in(uniform, sampler.numbers(T), stream)
    if cut:
        cupy.cuda.runtime.memsetAsync(bins, 0, 16 * T * DRAW_BINS, stream.ptr)
    head = logits.address, V, *best
    weighed = (*head, s.temperature, cut, chances, bins)
    kernel("draw", "weigh")((min(256, -(-V // 256)), T), (256,), weighed, stream=stream)
    limits = min(s.top_k, V), s.top_p, _least(s)
    kernel("draw", "draw")((T,), (1024,), (*head, chances, bins, *limits, uniform, tokens), stream=stream)
    return memory


def _least(s: Sampling) -> int:
    """The least draw weight of a token that is not excluded."""
    return max(1, math.ceil(s.min_p * ONE))


def _draw_each(context: Context, logits: Array, best: tuple[int, int], samplers: Samplers, tokens: int) -> Memory:
    """Draw as `_draw`, each row by its own sampler."""
    (T, V), stream = logits.shape, context.stream
    draws, at = np.zeros(T, DRAW), 0
    for sampler, rows in samplers.of:
        if not sampler.is_argmax:
            s = sampler.sampling
            cut = s.top_k > 0 or s.top_p < 1
            here = draws[at : at + rows]
            here[:] = (s.temperature, s.top_p, 0.0, _least(s), min(s.top_k, V), cut)
            here["uniform"] = sampler.numbers(rows)
        at += rows
    cut = bool(draws["cut"].any())
    memory = Memory(8 * T * (V + 2 * DRAW_BINS * cut) + draws.nbytes, stream)
    bins = memory.address + 8 * T * V
    each = bins + 16 * T * DRAW_BINS * cut
    copy_in(each, draws, stream)
    if cut:
        cupy.cuda.runtime.memsetAsync(bins, 0, 16 * T * DRAW_BINS, stream.ptr)
    head = logits.address, V, *best
    weighed = (*head, each, memory.address, bins)
    kernel("draw", "weigh_each")((min(256, -(-V // 256)), T), (256,), weighed, stream=stream)
    kernel("draw", "draw_each")((T,), (1024,), (*head, memory.address, bins, each, tokens), stream=stream)
    return memory
