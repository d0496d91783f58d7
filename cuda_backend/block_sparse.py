"""Attention that leaves out blocks of keys, as common.block_sparse defines it."""

from typing import Any

from common.block_sparse import BLOCK
from cuda_backend.arrays import Array
from cuda_backend.attention import Sight, attend_long, attention, write_rows
from cuda_backend.caches.formats import format_defines
from cuda_backend.caches.kv import KV
from cuda_backend.caches.planes import of_slot
from cuda_backend.context import Context
from cuda_backend.launch import kernel
from cuda_backend.layout import BLOCK_CHOICE


def block_sparse_attention(context: Context, q: Array, k: Array, v: Array, kv: KV, step: Any, scale: float) -> Array:
    """Compute `Ops.block_sparse_attention`.

    All keys are seen in short steps, in steps that begin within a block, and in caches that are rings or have codes.
    """
    (T, H, D), K, wide = q.shape, k.shape[1], kv.keys.width
    step = context.step_of(step, kv.store)
    past = kv.store.lengths[step.slot]
    if not step.prefill or past % BLOCK or kv.store.is_ring or format_defines(kv.keys, kv.values):
        return attention(context, (q, k, v), kv, step, scale)
    take, blocks, key_blocks = context.arena.take, -(-T // BLOCK), (past + T) // BLOCK
    words = (past + T - 1) // BLOCK // 32 + 1
    q16 = take(T * H * wide * 2)
    exact = write_rows(context, (q, k, v), kv, step, q16, (kv.keys, kv.values))
    own = of_slot((kv.keys, kv.values), step.slot)
    of_keys, of_queries = take(max(key_blocks, 1) * K * wide * 4), take(blocks * H * wide * 4)
    sight = Sight(take(K * blocks * words * 4), words)
    kernel("choose_blocks", "means", BLOCK_CHOICE)(
        (key_blocks + blocks, H),
        (128,),
        (q16, own[0].record, H, K, wide, T, key_blocks, scale, of_keys, of_queries),
        stream=context.stream,
    )
    shared = (2 * (past + T) // BLOCK + 2 + words) * 4
    kernel("choose_blocks", "choose", BLOCK_CHOICE)(
        (blocks, K),
        (128,),
        (of_keys, of_queries, H, K, wide, past // BLOCK, words, sight.address),
        shared_mem=shared,
        stream=context.stream,
    )
    return attend_long(context, q16, (kv.keys, kv.values), (T, H, D), step, scale, exact=exact, sight=sight)
