"""Multi-token prediction: a block of the model that predicts the token after the next (DeepSeek-V3, 2.2).

The block is one additional layer of the model. A row reads its token's embedding and the target's hidden state of the
previous position, after the last norm; the model's head predicts the next token from the row's output. The target's
steps also write the block's keys and values. To draft further tokens, the block reads the token that it drafted, with
its own output as hidden state. The first row of a sequence has a hidden state of zeros, as in llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import BimetalError
from common.models import ARCHITECTURES, Model, architecture
from common.models.blocks import MtpNames, RowFn
from common.models.chain import ChainPair
from common.ops import Array
from common.step import State, Step
from common.storage import ConvSpec, LayerSpec
from common.weights import Layout, Matrix, Names, Stored, Table, Vector, account, columns, load_weights

MOST = 8  # maximum number of blocks that are looked for
GGUF_NAMES = MtpNames(
    layer="",
    fc="nextn.eh_proj.weight",
    embedding_norm="nextn.enorm.weight",
    hidden_norm="nextn.hnorm.weight",
    norm="nextn.shared_head_norm.weight",
    embed="nextn.embed_tokens.weight",
    head="nextn.shared_head_head.weight",
)


@dataclass(frozen=True)
class Config:
    """Configuration of the block itself.

    embed, head  whether the block has an embedding, and a head, of its own
    """

    embed: bool
    head: bool


# -- the file ----------------------------------------------------------------------------------------------------------


def blocks_of(checkpoint: Checkpoint, definition: Any, c: Any) -> int:
    """Return the number of multi-token-prediction blocks in the checkpoint, of a model of configuration `c`."""
    names, layers = getattr(definition, "MTP", None), len(definition.state_spec(c))
    if names is None:
        return 0
    if checkpoint.format == "gguf":
        fc = [f"blk.{i}.{GGUF_NAMES.fc}" for i in range(layers, layers + MOST)]
        return sum(name in checkpoint.tensors for name in fc)
    return sum(_prefix(checkpoint, names, layers + i) is not None for i in range(1 if names.is_alone else MOST))


def _prefix(checkpoint: Checkpoint, names: MtpNames, layer: int) -> str | None:
    """Return the prefix of the block's names, or None if the checkpoint lacks the block."""
    prefixes = [prefix.format(layer) for prefix in names.prefixes]
    return next((prefix for prefix in prefixes if prefix + names.fc in checkpoint.tensors), None)


def refuse_block(checkpoint: Checkpoint) -> None:
    """Refuse a file of a block alone, which is no model. Raises BimetalError."""
    _, definition = architecture(checkpoint)
    c = definition.read_config(checkpoint)
    if not blocks_of(checkpoint, definition, c):
        return
    layers = len(definition.state_spec(c))
    prefix = f"blk.{layers}." if checkpoint.format == "gguf" else _prefix(checkpoint, definition.MTP, layers) or ""
    if all(name.startswith(prefix) for name in checkpoint.tensors):
        raise BimetalError(
            f"{checkpoint.path} is a draft, a multi-token-prediction block; name its model, and this as the draft"
        )


def layout(checkpoint: Checkpoint, name: str, c: Any) -> Layout:
    """Return the tables of the block at `checkpoint`, for a target of architecture `name` and configuration `c`.

    Raises BimetalError if there is no block, or if the block is for another model.
    """
    definition = ARCHITECTURES[name]
    _check_belongs(checkpoint, name)
    count = blocks_of(checkpoint, definition, c)
    if count != 1:
        has = f"{count} multi-token-prediction blocks; supported: 1" if count else "no multi-token-prediction block"
        raise BimetalError(f"{checkpoint.path} has {has}")
    layers = len(definition.state_spec(c))
    if checkpoint.format == "gguf":
        tensor, names = Names("gguf", f"blk.{layers}.", checkpoint.tensors), GGUF_NAMES
    else:
        definition.check_mtp(checkpoint)
        names = definition.MTP
        tensor = Names("hf", _prefix(checkpoint, names, layers) or "", checkpoint.tensors)
    table = definition.mtp_weights(c, Names(tensor.dialect, tensor.prefix + names.layer, checkpoint.tensors))
    own = lambda name: None if name.startswith(tensor.prefix) else "of the target"  # noqa: E731
    return Layout(_around(tensor, names, c, definition.NORM_FIX), [table], own)


def _around(tensor: Names, names: MtpNames, c: Any, fix: Any) -> Table:
    """Return the weights of the block beside those of a layer."""

    def norm(name: str) -> Vector:
        return Vector(tensor(name, name, (c.hidden,), fix))

    def half(start: int) -> Matrix:
        """Select half of the matrix over embedding and hidden state, in that order."""
        whole, cut = (c.hidden, 2 * c.hidden), columns(start, c.hidden)
        return Matrix(Stored((tensor.prefix + names.fc,), (c.hidden, c.hidden), cut, part_of=whole))

    def own(name: str) -> Matrix | None:
        return Matrix(tensor(name, name, (c.vocab, c.hidden))) if tensor.has(name) else None

    return {
        "of_embedding": half(0),
        "of_hidden": half(c.hidden),
        "embedding_norm": norm(names.embedding_norm),
        "hidden_norm": norm(names.hidden_norm),
        "last_norm": norm(names.norm) if tensor.dialect == "hf" or tensor.has(names.norm) else None,
        "embed": own(names.embed),
        "head": own(names.head),
    }


def _check_belongs(checkpoint: Checkpoint, target: str) -> None:
    name, definition = architecture(checkpoint)
    if not hasattr(ARCHITECTURES[target], "MTP"):
        known = sorted(name for name, each in ARCHITECTURES.items() if hasattr(each, "MTP"))
        raise BimetalError(f"{target} models have no multi-token-prediction block here; supported: {', '.join(known)}")
    if definition is not ARCHITECTURES[target]:
        raise BimetalError(
            f"{checkpoint.path} is of a {name} model; a multi-token-prediction block for a {target} model is needed, "
            "or a draft of the kind DFlash, DFlash2, DSpark or EAGLE-3"
        )


def check_mtp(checkpoint: Checkpoint, target: str, c: Any) -> None:
    """Refuse, by headers alone, a file without a block for a `target` of configuration `c`."""
    account(checkpoint, layout(checkpoint, target, c))


def _one_after_other(mixed: RowFn, ffn: RowFn, x: Array) -> Array:
    return ffn(mixed(x))


# -- target and block --------------------------------------------------------------------------------------------------


def load_mtp(checkpoint: Checkpoint, target: Model, progress: bool = False) -> "MtpPair":
    """Load the multi-token-prediction block of `checkpoint`, which may be the target's own, beside `target`."""
    tables, layers = layout(checkpoint, target.architecture, target.config), len(target.layout.layers)
    weights = load_weights(checkpoint, tables, target.ops, progress, layers, target.layout.out)
    parts = target.architecture, target.definition, target.config, target.layout, target.weights, target.ops
    config = Config(tables.top["embed"] is not None, tables.top["head"] is not None)
    return MtpPair(*parts, config, weights, tables, cache=target.cache, expert_stream=target.expert_stream)


@dataclass(frozen=True)
class MtpPair(ChainPair):
    """A target and its multi-token-prediction block."""

    draft: Config

    @property
    def draft_spec(self) -> list[LayerSpec]:
        """List the states of a layer, and the hidden state of the last committed token."""
        return [{**self.definition.mtp_spec(self.config), "last": ConvSpec(self.config.hidden, 2)}]

    def last_layers(self, state: State, step: Step, rows: slice, layers: range, outputs: Mapping[int, Array]) -> Array:
        ops, eps, weights = self.ops, self.config.eps, self.weights.layers
        parts = partial(self.definition.halves, ops, self.config)
        x = step.hidden if layers.start else ops.embed(self.weights.embed, step.tokens)
        for i in layers[:-1]:
            x = ops.scope(i, partial(_one_after_other, *parts(weights[i], state, step, i)), x)
        mixed, ffn = parts(weights[-1], state, step, layers[-1])

        def last(x: Array) -> tuple[Array, Array]:
            """Return the results at `rows`, as the target alone computes them, and the results at all rows."""
            x = mixed(x)
            every = ffn(x)
            return every if rows == slice(None) else ffn(x[rows]), every

        x, every = ops.scope(layers[-1], last, x)
        logits = self.head_logits(ops.rms_norm(x, self.weights.norm, eps))
        self._write(state, step, ops.rms_norm(every, self.weights.norm, eps))
        return logits

    def _write(self, state: State, step: Step, hidden: Array) -> None:
        """Write the block's rows of the step to the state, given the target's last normed hidden states (T, hidden)."""
        w = self.draft_weights.layers[0]
        x = self._inputs(state, step, hidden)
        self.definition.write_past(self.ops, self.config, w, state, step, len(self.weights.layers), x)

    def _inputs(self, state: State, step: Step, hidden: Array) -> Array:
        """Return the block's input (T, hidden): each row's token, and of `hidden` (T, hidden) the row before it."""
        ops, w, eps = self.ops, self.draft_weights, self.config.eps
        before = ops.parent_rows(hidden, state[len(self.weights.layers)].last, step)
        token = ops.embed(self.weights.embed if w.embed is None else w.embed, step.tokens)
        of_token = ops.linear(ops.rms_norm(token, w.embedding_norm, eps), w.of_embedding)
        return ops.add(of_token, ops.linear(ops.rms_norm(before, w.hidden_norm, eps), w.of_hidden))

    # -- drafting ------------------------------------------------------------------------------------------------------

    def _first(self, step: Step) -> Array:
        return self.ops.embed(self.weights.embed, step.tokens)

    def _pass(self, state: State, step: Step, hidden: Array) -> Array:
        ops, layer, own = self.ops, len(self.weights.layers), self.draft_weights
        mixed, ffn = self.definition.halves(ops, self.config, own.layers[0], state, step, layer)
        x = ffn(mixed(self._inputs(state, step, hidden)))
        return ops.rms_norm(x, self.weights.norm if own.last_norm is None else own.last_norm, self.config.eps)

    def _head(self, hidden: Array) -> Array:
        head = self.draft_weights.head
        return self.head_logits(hidden) if head is None else self.ops.linear(hidden, head)
