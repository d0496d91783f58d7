"""Sample, and compute argmax, top-k and entropy of logits on the device; logits are not copied to the host."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np

from common.options import Sampling
from common.sampling import ONE, Sampler, Samplers
from common.step import MAX_DECODE_ROWS
from cuda_backend.arrays import Array
from cuda_backend.context import Context
from cuda_backend.launch import kernel
from cuda_backend.memory import Memory, upload
from cuda_backend.rows import dense, out_of_arena, pieces_of
from cuda_backend.to_host import Arrival
from cuda_backend.views import float4_aligned, view

DRAW_BINS = 2048  # kernels/draw.cu BINS
DRAW = np.dtype("f8, f8, f8, u8, i4, i4")  # kernels/draw.cu Draw
DRAW.names = "temperature", "top_p", "number", "least", "top_k", "row"
WORKSPACE = 32 << 20  # bytes for the draw weights of a group of rows; a single row may take more
MOST_BEST = 64  # largest k of kernels/top_k.cu
CTA_KEYS = 4096  # logits per CTA of kernels/top_k.cu


def sample(context: Context, logits: Array, sampler: Sampler | Samplers) -> Array:
    """Choose a token for each row, int32 (T,), by `sampler`, or by each row's own sampler."""
    T, stream = logits.shape[0], context.stream
    best, keys = _best(context, logits)
    if sampler.is_argmax:
        arrival = context.to_host.expect(T)
        tokens = arriving(arrival, T, keys)
        next_step = context.replay.decode_inputs.place_for(tokens) if T <= MAX_DECODE_ROWS else tokens.address
        kernel("sample", "final")((T,), (32,), (*best, tokens.address, next_step, arrival.address), stream=stream)
        arrival.launched()
        return tokens
    memory = Memory(T * 4, stream)
    tokens = Array((T,), memory.address, owner=(memory, keys), dtype=np.int32)
    if isinstance(sampler, Samplers):
        _draw_each(context, logits, best, sampler, tokens.address)
    else:
        _draw(context, logits, best, sampler, tokens.address)
    tokens.arrival = context.to_host.copy(tokens.address, T)
    return tokens


def greedy_tokens(context: Context, logits: Array, count: int, arrival: Arrival) -> Array:
    """Return the most probable token of each of the first `count` rows of a step's logits, which lie in the arena.

    The tokens are those of `sample`; the logits are not copied.

    arrival  of `count` numbers, with which the step was uploaded
    """
    T, inputs, stream = logits.shape[0], context.replay.decode_inputs, context.stream

    def choose(keys: int, pieces: int) -> None:
        args = keys, pieces, inputs.memory.address, inputs.tokens
        kernel("sample", "choose")((T,), (32,), args, stream=stream)

    _choose_in_place(context, logits, choose, ())
    arrival.launched()
    tokens = arriving(arrival, count)
    inputs.place_for(tokens)
    return tokens


def draft_chains(context: Context, logits: Array, arrival: Arrival, rows: int, first: int, count: int) -> Array:
    """Join newest tokens and drafted ones as Ops.run_chains does, from the logits of the pass, which lie in the arena.

    arrival  of as many numbers as there are tokens, with which the pass was uploaded
    """
    T, inputs, stream = len(arrival.numbers), context.replay.decode_inputs, context.stream

    def chains(keys: int, pieces: int) -> None:
        args = keys, pieces, inputs.memory.address, inputs.tokens, rows, first, 1 + count
        kernel("sample", "chains")((T,), (32,), args, stream=stream)

    _choose_in_place(context, logits, chains, (T, rows, first, count))
    arrival.launched()
    return arriving(arrival, T)


def _choose_in_place(context: Context, logits: Array, choose: Callable[[int, int], None], key: tuple[int, ...]) -> None:
    """Find the best of each piece of a row of logits in the arena, and call `choose` with the keys and pieces per row.

    The launches are captured and replayed, since their arguments depend only on `key` and on where the logits lie.
    """
    (T, V), stream, replay = logits.shape, context.stream, context.replay
    if not float4_aligned(logits):
        best, _keys = _best(context, out_of_arena(context, logits, T))
        choose(*best)
        return
    pieces = pieces_of(V)
    keys = replay.decode_inputs.keys(pieces)

    def launch() -> None:
        kernel("sample", "add_up")((pieces, T), (256,), (view(logits), V, 0, keys), stream=stream)
        choose(keys, pieces)

    place = logits.address, logits.strides, logits.partials, logits.partial_stride
    replay.replayed((key, T, V, *place), launch)


def best_of_rank(context: Context, logits: Array, first: int) -> Array:
    """Return the best of a rank's logits (T, n), of the tokens from `first` on: (T, 4), in the arena, for `gather`."""
    (T, V), stream, arena = logits.shape, context.stream, context.arena
    pieces = pieces_of(V)
    keys, best = arena.take(8 * T * pieces), arena.take(16 * T)
    if float4_aligned(logits):
        kernel("sample", "add_up")((pieces, T), (256,), (view(logits), V, 0, keys), stream=stream)
    else:
        args = dense(context, logits).address, V, keys
        kernel("sample", "partial")((pieces, T), (256,), args, stream=stream)
    kernel("sample", "best_of_rank")((T,), (32,), (keys, pieces, first, best), stream=stream)
    return Array((T, 4), best)


def choose_of_ranks(context: Context, best: Array) -> None:
    """Write the tokens of the step that is launched, from what `best_of_rank` found on all ranks: (T, ranks * 4)."""
    (T, n), inputs = best.shape, context.replay.decode_inputs
    args = best.address, n // 4, inputs.memory.address, inputs.tokens
    kernel("sample", "choose_of_ranks")((-(-T // 32),), (32,), args, stream=context.stream)


def arriving(arrival: Arrival, count: int, keys: Memory | None = None) -> Array:
    """Return the tokens that kernels write to the memory of an Arrival; `keys` lives as long as they do."""
    tokens = Array((count,), arrival.on_device, owner=(arrival, keys), dtype=np.int32)
    tokens.arrival = arrival
    return tokens


def _best(context: Context, logits: Array) -> tuple[tuple[int, int], Memory | None]:
    """Return (address of the largest key of each piece of each row, pieces per row) and the keys' memory, if new."""
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
    """Test whether the kernels support the top k of V tokens."""
    return k <= MOST_BEST and _pieces_of_best(V) * k <= CTA_KEYS


def top_k(context: Context, logits: Array, k: int) -> tuple[Array, Array]:
    """Find the best k tokens of each row, int32 (T, k), and their log-probabilities, float32."""
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
    """Find each row's most probable token except `excluded`, int32 (T,), and its entropy without it, float32 (T,)."""
    (T, V), stream = logits.shape, context.stream
    pieces = _pieces_of_best(V)
    memory = Memory(T * (16 * pieces + 8), stream)
    keys, sums, ids = (memory.address + n * T for n in (0, 8 * pieces, 16 * pieces))
    out = [Array((T,), ids + 4 * i * T, owner=memory, dtype=t) for i, t in enumerate((np.int32, np.float32))]
    kernel("entropy", "partial")((pieces, T), (256,), (logits.address, V, excluded, keys, sums), stream=stream)
    out[0].arrival = arrival = context.to_host.expect(2 * T)
    last = keys, sums, pieces, out[0].address, out[1].address, arrival.address
    kernel("entropy", "final")((T,), (32,), last, stream=stream)
    arrival.launched()
    return out[0], out[1]


def _draw(context: Context, logits: Array, best: tuple[int, int], sampler: Sampler, tokens: int) -> None:
    """Launch Sampler.pick of each row; `best`: the largest keys of its pieces; write int32 to `tokens`."""
    s, (T, V), stream = sampler.sampling, logits.shape, context.stream
    keys, pieces = best
    cut = s.top_k > 0 or s.top_p < 1
    numbers = upload(sampler.numbers(T), stream)
    limits = min(s.top_k, V), s.top_p, _least(s)
    for first, rows, probabilities, bins in _groups(context, T, V, cut):
        head = logits.address + 4 * V * first, V, keys + 8 * pieces * first, pieces
        weighed = (*head, s.temperature, cut, probabilities, bins)
        kernel("draw", "weigh")((min(256, -(-V // 256)), rows), (256,), weighed, stream=stream)
        drawn = (*head, probabilities, bins, *limits, numbers.address + 8 * first, tokens + 4 * first)
        kernel("draw", "draw")((rows,), (1024,), drawn, stream=stream)


def _groups(context: Context, rows: int, V: int, cut: bool) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, rows, addresses of their probabilities and of their bins) of groups sampled one by one.

    Groups are drawn one after another in the memory in which prefill expands matrices, of at least WORKSPACE bytes or
    one row.
    """
    row_bytes, arena, stream = 8 * (V + 2 * DRAW_BINS), context.arena, context.stream
    probabilities = arena.scratch(max(WORKSPACE, row_bytes), stream)
    most = arena.passing.nbytes // row_bytes
    for first in range(0, rows, most):
        count = min(most, rows - first)
        bins = probabilities + 8 * V * count
        if cut:
            cupy.cuda.runtime.memsetAsync(bins, 0, 16 * DRAW_BINS * count, stream.ptr)
        yield first, count, probabilities, bins


def _least(s: Sampling) -> int:
    """Return the smallest draw weight of a token that is not excluded."""
    return max(1, math.ceil(s.min_p * ONE))


def _draw_each(context: Context, logits: Array, best: tuple[int, int], samplers: Samplers, tokens: int) -> None:
    """Sample as `_draw`, each row by its own sampler; rows of greedy samplers take their largest logit."""
    (T, V), stream = logits.shape, context.stream
    if samplers.prepared is None or samplers.prepared[0] != V:
        samplers.prepared = V, *_draws(samplers, V)
    _, draws, cut = samplers.prepared
    if len(draws) < T:
        kernel("sample", "final")((T,), (32,), (*best, tokens, tokens, tokens), stream=stream)
    drawn = [sampler.numbers(rows) for sampler, rows in samplers.of_sequences if not sampler.is_argmax]
    draws["number"] = np.concatenate(drawn)
    records = upload(draws, stream)
    head = logits.address, V, *best
    for first, rows, probabilities, bins in _groups(context, len(draws), V, cut):
        own = records.address + DRAW.itemsize * first
        weighed = (*head, own, probabilities, bins)
        kernel("draw", "weigh_each")((min(256, -(-V // 256)), rows), (256,), weighed, stream=stream)
        kernel("draw", "draw_each")((rows,), (1024,), (*head, probabilities, bins, own, tokens), stream=stream)


def _draws(samplers: Samplers, V: int) -> tuple[np.ndarray, bool]:
    """Return the records of all rows that are drawn, without their numbers; and whether top-k or top-p excludes any."""
    draws, cut, at = list[tuple[Any, ...]](), False, 0
    for sampler, rows in samplers.of_sequences:
        if not sampler.is_argmax:
            s = sampler.sampling
            cut = cut or s.top_k > 0 or s.top_p < 1
            same = s.temperature, s.top_p, 0.0, _least(s), min(s.top_k, V)
            draws += [(*same, row) for row in range(at, at + rows)]
        at += rows
    return np.array(draws, DRAW), cut
