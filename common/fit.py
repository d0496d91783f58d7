"""Predict the memory that a model takes, from its headers alone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.adapted import changes_of, factors_of
from common.backend import VECTOR_ITEM, LayerSize
from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.ops import Ops
from common.storage import KVSpec, LatentSpec, LayerSpec, grows
from common.tensors import Tensor, stack
from common.weights import ExpertMatrix, Layout, Matrix, Stored, Table, account, own_part

SPARE = 0.05  # share of free memory kept for what is not predicted: a draft's states and inputs, graphs, libraries
SPARE_OF_ROWS = 0.15  # share of memory beside weights that is kept when the rows of a prefill step are chosen
LEAST_ROWS = 256
NO_BYTES = np.empty(0, np.uint8)
LEAST_CONTEXT = 512


class Blueprint(NamedTuple):
    """A model as the headers of its files describe it: memory is predicted from it, before and after loading.

    config  the architecture's configuration
    layout  the table of weights
    spec    what each layer stores of a sequence, in the formats of the KV cache
    """

    config: Any
    layout: Layout
    spec: Sequence[LayerSpec]


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Need:
    """Peak bytes while a prompt of the whole context is read, without the interpreter.

    kv     keys and values, which grow with the context
    state  states of a fixed size
    work   workspace
    rows   of the steps that read the prompt
    draft  a draft's weights and states
    """

    weights: int
    kv: int
    state: int
    work: int
    rows: int
    draft: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.state + self.work + self.draft


def predict_weights(checkpoint: Checkpoint, layout: Layout, ops: Ops) -> int:
    """Predict the bytes of the weights on the backend of `ops`, by headers. Raises BimetalError as loading would."""
    return sum(predict_layers(checkpoint, layout, ops)) + ops.expert_vram


def predict_layers(checkpoint: Checkpoint, layout: Layout, ops: Ops, out: int | None = None) -> list[int]:
    """Predict bytes as `predict_weights`, by layer; weights outside the layers count to the layer on their device.

    out  the layer beside which the last norm and the head lie, if not `layout.out`
    """
    account(checkpoint, layout)
    kinds: dict[Any, Tensor] = {}
    sizes = [0] * len(layout.layers)
    places = [(layout.layer_of(name, out=out), name, entry) for name, entry in layout.top.items()]
    places += [(i, name, entry) for i, table in enumerate(layout.layers) for name, entry in table.items()]
    for layer, name, entry in places:
        if isinstance(entry, Matrix):
            parts = [_shaped(checkpoint, part, (name, i), kinds) for i, part in enumerate(entry.parts)]
            held = ops.held_expert_bytes if isinstance(entry, ExpertMatrix) else ops.held_bytes
            sizes[layer] += held(*parts)
        elif entry is not None:
            sizes[layer] += VECTOR_ITEM * math.prod(entry.stored.shape)
    changes = changes_of(layout, checkpoint.adapters)
    for layer, table in enumerate(layout.layers):
        changed = [changes[entry] for entry in table.values() if entry in changes]
        sizes[layer] += sum(ops.held_bytes(factor) for each in changed for factor in factors_of(each, ops.adapter_type))
    return sizes


def predict_stacks(checkpoint: Checkpoint, layout: Layout, ops: Ops) -> list[tuple[int, ...]]:
    """Predict the bytes of each stack of experts, by layer, if `ops` held all experts; () for a layer without."""
    kinds: dict[Any, Tensor] = {}
    sizes = []
    for table in layout.layers:
        stacks = [(name, entry) for name, entry in table.items() if isinstance(entry, ExpertMatrix)]
        parts = [[_shaped(checkpoint, p, (name, i), kinds) for i, p in enumerate(e.parts)] for name, e in stacks]
        sizes.append(tuple(ops.held_bytes(*tensors) for tensors in parts))
    return sizes


def _shaped(checkpoint: Checkpoint, stored: Stored, where: tuple[str, int], kinds: dict[Any, Tensor]) -> Tensor:
    """Return the canonical tensor's type and shape. A fix is run once for all layers that store this weight alike."""
    first = checkpoint.tensors[stored.names[0]]
    if stored.fix is None:
        return Tensor(
            first.name, first.type, stored.shape, NO_BYTES, first.scales, first.biases, first.bits, first.group_size
        )
    kind = where, first.type, first.shape, first.bits, first.group_size, stored.shape
    if kind not in kinds:
        tensors = own_part(checkpoint, stored)
        first = tensors[0]
        kinds[kind] = stored.fix(stack(tensors) if len(tensors) > 1 else first)
    return kinds[kind]


def predict_run(ops: Ops, blueprint: Blueprint, tokens: int, rows: int, parallel: int = 1) -> tuple[int, int, int]:
    """Predict the bytes of (kv, state, work) while `tokens` tokens are read in steps of `rows`.

    parallel  number of sequences; if the backend has a pool, they share memory for `tokens` tokens together
    """
    config, layout, spec = blueprint
    kv = [{name: s for name, s in layer.items() if grows(s)} for layer in spec]
    fixed = [{name: s for name, s in layer.items() if not grows(s)} for layer in spec]
    sizes = [layer_size(table, states, config) for table, states in zip(layout.layers, spec, strict=True)]
    return (
        ops.held_pool_bytes(kv, parallel, tokens, tokens, rows),
        ops.held_pool_bytes(fixed, parallel, tokens, tokens, rows),
        ops.work_bytes(sizes, tokens, rows)
        + ops.decode_bytes(sizes, tokens, parallel)
        + ops.logits_bytes(config.vocab, parallel),
    )


def predict_need(ops: Ops, blueprint: Blueprint, tokens: int, weights: int, limit: int, parallel: int = 1) -> Need:
    """Predict the memory of a model whose weights take `weights` bytes, while it reads `tokens` tokens.

    limit     bytes that are free before the weights are loaded
    parallel  sequences of up to `tokens` tokens each, as in `predict_run`
    """

    def need(rows: int) -> Need:
        return Need(weights, *predict_run(ops, blueprint, tokens, rows, parallel), rows)

    def fits(rows: int) -> bool:
        return need(rows).total - weights <= (1 - SPARE_OF_ROWS) * (limit - weights)

    return need(most_rows(fits, ops.prefill_rows) if ops.reserves else ops.prefill_rows)


def most_tokens(fits: Callable[[int], bool], limit: int) -> int:
    """Find the largest number of tokens up to `limit` that fits; 1 if none does."""
    if fits(limit):
        return limit
    low, high = 1, limit
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def what_fits(
    ops: Ops, blueprint: Blueprint, parallel: int = 1, spare: float = SPARE, free: int | None = None
) -> Callable[..., bool]:
    """Make a test `fits(tokens, rows, shared=None)` of whether sequences fit beside loaded weights.

    It is true if `parallel` sequences of up to `tokens` tokens fit, whose prompts are read in steps of `rows` rows, and
    which hold at most `shared` tokens together (None: `tokens`).

    spare  share of the free memory that is kept for what is not predicted
    free   bytes beside the weights; None: what is free now, with the weights loaded
    """
    config, layout, spec = blueprint
    devices = ops.free_by_device(len(spec)) if free is None else [(free, range(len(spec)))]

    def fits(tokens: int, rows: int, shared: int | None = None) -> bool:
        def need(own: Sequence[int]) -> int:
            part = [spec[i] for i in own]
            sizes = [layer_size(layout.layers[i], spec[i], config) for i in own]
            states = ops.held_pool_bytes(part, parallel, tokens, shared or tokens, rows)
            logits = ops.logits_bytes(config.vocab, parallel) if layout.out in own else 0
            work = ops.work_bytes(sizes, tokens, rows) + ops.decode_bytes(sizes, tokens, parallel)
            return states + work + logits

        return all(need(own) <= (1 - spare) * free for free, own in devices)

    return fits


def rows_that_fit(ops: Ops, blueprint: Blueprint, tokens: int, parallel: int = 1) -> int:
    """Find the rows of a prefill step with which `tokens` tokens fit beside loaded weights."""
    fits = what_fits(ops, blueprint, parallel, SPARE_OF_ROWS)
    return most_rows(lambda rows: fits(tokens, rows), ops.prefill_rows)


def most_rows(fits: Callable[[int], bool], limit: int) -> int:
    """Return the first of `limit`, `limit` / 2, ... down to LEAST_ROWS that fits; LEAST_ROWS if none does."""
    rows = limit
    while rows > LEAST_ROWS and not fits(rows):
        rows //= 2
    return rows


def context_that_fits(ops: Ops, blueprint: Blueprint, parallel: int = 1) -> int:
    """Find the longest context, up to the trained one, whose states and prompt fit beside loaded weights.

    parallel  sequences, which share memory for the tokens of one

    Raises BimetalError if LEAST_CONTEXT tokens do not fit.
    """
    fits_at = what_fits(ops, blueprint, parallel)

    def fits(tokens: int) -> bool:
        return fits_at(tokens, ops.prefill_rows)

    most: int = blueprint.config.context
    least = min(LEAST_CONTEXT, most)
    if not fits(least):
        left = " and ".join(f"{free / 1e9:.1f} GB" for free, _ in ops.free_by_device(len(blueprint.spec)))
        raise BimetalError(
            f"the weights leave {left} of {ops.free_bytes()[1]}, too little for a context of {least} tokens; "
            "choose a smaller quantization, or ask for fewer tokens"
        )
    return most_tokens(fits, most)


def shared_that_fits(ops: Ops, blueprint: Blueprint, tokens: int, parallel: int) -> int:
    """Find how many tokens `parallel` sequences of up to `tokens` may hold together beside loaded weights."""
    fits = what_fits(ops, blueprint, parallel)
    return max(tokens, most_tokens(lambda shared: fits(tokens, ops.prefill_rows, shared), parallel * tokens))


def layer_size(table: Table, states: LayerSpec, config: Any) -> LayerSize:
    """Measure the work of one layer per row, from its table of weights."""
    values, part, gathered = {"mixer": 0, "ffn": 0}, "mixer", 0
    for name, entry in table.items():
        part = "ffn" if name == "ffn_norm" else part
        if name.endswith("_post_norm"):  # beside the two norms that LayerSize.hidden stands for
            values[part] += config.hidden
        if isinstance(entry, Matrix):
            *stacked, _, columns = entry.parts[0].shape
            times = 1
            if stacked:  # experts, of which some are chosen, or latent attention's matrices, counted as `expanded`
                times = config.experts.top_k if name.startswith("experts_") else 0
            values[part] += times * (sum(p.shape[-2] for p in entry.parts) + columns)
            gathered += (times - 1) * columns if name == "experts_gate_up" else 0
    heads = expanded = 0
    for s in states.values():
        if isinstance(s, KVSpec):
            heads = _columns(table, "o") // s.value_dim
        elif isinstance(s, LatentSpec):
            heads = config.heads
            expanded = heads * (2 * config.nope_dim + config.rope_dim + config.value_dim)
    return LayerSize(values["mixer"], values["ffn"], config.hidden, heads, expanded, states, gathered)


def _columns(table: Table, name: str) -> int:
    entry = table[name]
    assert entry is not None
    return entry.parts[0].shape[-1]
