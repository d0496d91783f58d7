"""The architectures, by the names that checkpoints give them, and one function that loads any of them."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

from common.adapted import adapter_of, handles_of
from common.checkpoint import Checkpoint, open_checkpoint
from common.decoders import PRESETS, WedlmOptions
from common.errors import BimetalError
from common.expert_stream import ExpertStream
from common.experts import ExpertSupply
from common.fit import Blueprint
from common.kv_cache import CacheOptions, check_pairs, packed
from common.models import deepseek, gemma3, glm, glm4_moe, gpt_oss, granite, laguna, llama, olmo2, phi3, qwen35
from common.ops import Array, Ops
from common.shards import Ranks
from common.step import MAX_DECODE_ROWS, Pool, Repeated, State, Step
from common.storage import LayerSpec
from common.wedlm_calibration import window_beside
from common.weights import Layout, Matrix, load_weights

ARCHITECTURES: dict[str, ModuleType] = {  # GGUF general.architecture and config.json model_type
    "deepseek2": glm,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm,
    "glm4moe": glm4_moe,
    "gpt-oss": gpt_oss,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "granitemoe": granite,
    "laguna": laguna,
    "llama": llama,
    "mistral": llama,
    "mistral3": llama,
    "olmo2": olmo2,
    "olmo3": olmo2,
    "phi3": phi3,
    "qwen2": llama,
    "qwen3": llama,
    "qwen3_moe": llama,
    "qwen3moe": llama,
    "qwen3_next": qwen35,
    "qwen3_vl": llama,
    "qwen3_vl_moe": llama,
    "qwen3_vl_moe_text": llama,
    "qwen3_vl_text": llama,
    "qwen3next": qwen35,
    "qwen3vl": llama,
    "qwen3vlmoe": llama,
    "qwen35": qwen35,
    "qwen35moe": qwen35,
    "qwen3_5": qwen35,
    "qwen3_5_text": qwen35,
    "qwen3_5_moe": qwen35,
    "qwen3_5_moe_text": qwen35,
    "smollm3": llama,
    "wedlm": llama,
}


PARTS = 4  # most parts into which the layers of a prefill step are divided
DIVIDED_ROWS = 257  # fewest rows of a step that is divided: one of fewer rows takes little longer than a decoding step
KIND_KEYS = ("architectures", "general.architecture", "speculators_model_type")  # that name the kind of a draft
DRAFTS = ("dflash", "dspark", "eagle3")  # marks of drafts, some of which have a model's model_type


def is_defined(checkpoint: Checkpoint) -> bool:
    """Test whether the checkpoint's architecture is defined here."""
    name = _name(checkpoint)
    return isinstance(name, str) and name in ARCHITECTURES


def exceeds_float16(checkpoint: Checkpoint) -> bool:
    """Test whether activations of this architecture exceed float16's maximum of 65504."""
    return is_defined(checkpoint) and getattr(architecture(checkpoint)[1], "EXCEEDS_FLOAT16", False)


def architecture(checkpoint: Checkpoint) -> tuple[str, ModuleType]:
    """Return the architecture and the module that defines it; raises BimetalError for drafts and unknown ones."""
    name = _name(checkpoint)
    if any(mark in kind_of(checkpoint) for mark in DRAFTS):
        raise BimetalError(f"{checkpoint.path} is a draft; name its model, and this as the draft")
    if not is_defined(checkpoint):
        raise BimetalError(f"{checkpoint.path}: {_name_key(checkpoint)} is {name!r}; supported: {_supported()}")
    return str(name), ARCHITECTURES[str(name)]


def _supported() -> str:
    """List the names of architectures, each in one spelling."""
    found = {name.replace("_", "").replace("-", "").removesuffix("text"): name for name in sorted(ARCHITECTURES)[::-1]}
    return ", ".join(sorted(found.values()))


def kind_of(checkpoint: Checkpoint) -> str:
    """List the names in a checkpoint's configuration that distinguish drafts from models, in lower case."""
    return " ".join(str(checkpoint.config.get(key, "")) for key in KIND_KEYS).lower()


def rank_config(definition: ModuleType, checkpoint: Checkpoint, ranks: Ranks) -> Any:
    """Read the checkpoint's configuration with the heads and channels that one of `ranks` computes.

    The layout and the state specification of such a configuration are this rank's too. Raises BimetalError where heads
    or channels cannot be shared equally.
    """
    config = definition.read_config(checkpoint)
    try:
        return config if ranks.size == 1 else definition.for_rank(config, ranks)
    except BimetalError as error:
        raise BimetalError(f"{checkpoint.path}: {error}") from None


def _name(checkpoint: Checkpoint) -> Any:
    """Return the name of the architecture; a model with a vision tower whose text is another one has both names."""
    name, text = checkpoint.config.get(_name_key(checkpoint)), checkpoint.config.get("text_config")
    kind = text.get("model_type", "mistral") if isinstance(text, dict) else "mistral"
    return f"{name} of {kind}" if name == "mistral3" and kind != "mistral" else name


def _name_key(checkpoint: Checkpoint) -> str:
    return "general.architecture" if checkpoint.format == "gguf" else "model_type"


@dataclass(frozen=True)
class Model:
    """A loaded model: its definition, its configuration and its weights on one backend.

    repeats  the work of a long step is the same at every length of a state: step.Repeated
    """

    repeats: ClassVar[bool] = True

    architecture: str
    definition: ModuleType
    config: Any
    layout: Layout
    weights: SimpleNamespace
    ops: Ops
    cache: CacheOptions = field(default=CacheOptions(), kw_only=True)
    expert_stream: ExpertSupply | None = field(default=None, kw_only=True)  # of experts, of which some are in memory
    window: WedlmOptions = field(default=PRESETS["balanced"], kw_only=True)  # of replies that are given none

    @cached_property
    def step_bytes(self) -> int:
        """Count the weight bytes that one decoded token reads: all but an untied embedding; of experts, chosen ones."""
        total = 0.0
        for table, handles in zip(
            (self.layout.top, *self.layout.layers), (self.weights, *self.weights.layers), strict=True
        ):
            for name, entry in table.items():
                if isinstance(entry, Matrix) and not (name == "embed" and self.layout.top["head"] is not None):
                    share = self.config.experts.top_k / self.config.experts.count if name.startswith("experts_") else 1
                    total += share * sum(map(self.ops.weight_bytes, handles_of(getattr(handles, name))))
        return int(total)

    @property
    def blueprint(self) -> Blueprint:
        """Return what predicts the memory of sequences; the layers of a draft follow where their states grow."""
        return Blueprint(self.config, self.layout, self.state_spec)

    def new_state(self, capacity: int) -> State:
        return self.ops.new_state(self.sequence_spec, capacity)

    def new_pool(self, slots: int, capacity: int, tokens: int | None = None) -> Pool | None:
        """Make a pool of states, as Ops.new_pool."""
        return self.ops.new_pool(self.sequence_spec, slots, capacity, tokens)

    @cached_property
    def state_spec(self) -> list[LayerSpec]:
        """List what each layer stores for a sequence; raises UsageError for cache formats that the backend lacks."""
        spec = packed(self.definition.state_spec(self.config), self.cache)
        check_pairs(spec, self.ops.name, self.ops.cache_pairs)
        return spec

    @property
    def sequence_spec(self) -> list[LayerSpec]:
        """List what a state stores: of each layer of the model, and then of each layer of a draft."""
        return self.state_spec

    def forward(self, state: State, step: Step, rows: slice = slice(None)) -> Array:
        """Compute the logits (n, vocab) of `rows` of the step; commits nothing."""
        if rows == slice(None):
            return self.ops.run(self._every_row, state, step)
        T = len(step)
        start, stop, stride = rows.indices(T)  # a backend may run more rows than the step has
        if self.ops.replays and T <= MAX_DECODE_ROWS:
            return self.ops.run(self._every_row, state, step, slice(start, stop, stride))
        if self.repeats and start >= stop:
            return self.ops.run(self._no_row, state, step)
        if self.repeats and (start, stop) == (T - 1, T):
            return self.ops.run(self._last_row, state, step)
        return self.ops.run(partial(self._logits, rows=slice(start, stop, stride)), state, step)

    def greedy_tokens(self, state: State, step: Step) -> Array:
        """Compute the most probable token after each row of a step, (T,) int32; commits nothing.

        A backend may then leave the logits where it computed them.
        """
        return self.ops.run_greedy(self._every_row, state, step)

    def forward_in_parts(self, state: State, step: Step, rows: slice) -> Generator[None, None, Array]:
        """Compute what `forward` returns in parts of consecutive layers; yields between them.

        Other sequences may run steps in between: an unfinished step has changed nothing that they read.
        """
        if not self.divides(len(step)):
            return self.forward(state, step, rows)
        *parts, (no_row, last_row) = self._parts
        for part in parts:
            step = replace(step, hidden=self.ops.computed(self.ops.run(part, state, step)))
            yield
        return self.ops.run(no_row if rows.start == rows.stop else last_row, state, step)

    def divides(self, rows: int) -> bool:
        """Test whether `forward_in_parts` divides a step of a prompt with `rows` rows."""
        return self.ops.divides and self.expert_stream is None and rows >= DIVIDED_ROWS

    @cached_property
    def layer_parts(self) -> list[range]:
        """Divide the layers into those of each part of a long step."""
        count, parts = len(self.weights.layers), min(PARTS, len(self.weights.layers))
        return [range(count * i // parts, count * (i + 1) // parts) for i in range(parts)]

    @cached_property
    def _parts(self) -> list[Any]:
        """Build one function for each part of a long step, and two for the last: without logits, and with one row's."""
        layers = self.layer_parts
        last = [Repeated(self._part, rows=rows, layers=layers[-1]) for rows in (slice(0, 0), slice(-1, None))]
        return [*(Repeated(self._part, rows=slice(None), layers=each) for each in layers[:-1]), last]

    @cached_property
    def _every_row(self) -> Callable[[State, Step], Array]:
        """Return the function of a decoder's step: one for all steps, so that a backend may capture it."""
        return partial(self._logits, rows=slice(None))

    @cached_property
    def _no_row(self) -> Callable[[State, Step], Array]:
        """Return the function of a long step without logits."""
        return Repeated(self._logits, rows=slice(0, 0))

    @cached_property
    def _last_row(self) -> Callable[[State, Step], Array]:
        """Return the function of a long step with the logits of its last row."""
        return Repeated(self._logits, rows=slice(-1, None))

    @cached_property
    def prompt_rows(self) -> int:
        """Return the number of which the rows of long steps should be multiples, so that few sizes of steps occur."""
        return self.ops.prompt_rows(self.state_spec) if self.repeats else 1

    def _logits(self, state: State, step: Step, rows: slice) -> Array:
        return self.definition.forward(self.ops, self.config, self.weights, state, step, rows)

    def _part(self, state: State, step: Step, rows: slice, layers: range) -> Array:
        return self.definition.forward(self.ops, self.config, self.weights, state, step, rows, layers)


OpenExperts = Callable[[Checkpoint, Layout, Any], ExpertStream]  # also takes the model's configuration


def load_model(path: Any, ops: Ops, progress: bool = False, open_experts: OpenExperts | None = None) -> Model:
    """Read configuration and weights of the checkpoint at `path` (or an open Checkpoint) onto the backend of `ops`.

    open_experts  opens the stream from which experts are read while the model runs; None: all weights are loaded
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    model: Model = ops.load(lambda each: _load_model(checkpoint, each, progress, open_experts))
    return model


def _load_model(checkpoint: Checkpoint, ops: Ops, progress: bool, open_experts: OpenExperts | None) -> Model:
    name, definition = architecture(checkpoint)
    config = rank_config(definition, checkpoint, ops.ranks)
    layout = definition.layout(config, checkpoint)
    stream = None if open_experts is None else open_experts(checkpoint, layout, config)
    streamed = {} if stream is None else stream.handles(layout)
    adapt = adapter_of(layout, checkpoint.adapters, ops)
    weights = load_weights(checkpoint, layout, ops, progress, streamed=streamed, adapt=adapt)
    window = PRESETS["balanced"] if getattr(config, "mask_id", None) is None else window_beside(checkpoint.path)
    supply = stream or ops.expert_supply
    return Model(name, definition, config, layout, weights, ops, expert_stream=supply, window=window)
