"""Every op over odd shapes, as data: a case runs on any backend, and NumpyOps gives the expected result.

Inputs reach a backend as an embedding's rows do, so that they have the dtype of its activations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.ops import (
    Array,
    DeltaInputs,
    DeltaWeights,
    ExpertBiases,
    ExpertWeights,
    GateWeights,
    LatentWeights,
    Ops,
    Rope,
)
from common.step import Step
from common.storage import ConvSpec, DeltaSpec, KVSpec, LatentSpec, LayerSpec
from common.tensors import Tensor
from common.weights import dense

ROWS = (1, 7, 33, 140)
PASTS = (0, 1, 255, 256, 257)

# Largest error of an output relative to its largest value, in float32, float16 and bfloat16 activations: a few units
# in the last place of the inputs' rounding (6e-8, 5e-4, 4e-3), times what the op adds up.
TOLERANCE = {
    "embed": (0, 5e-4, 4e-3),
    "linear": (1e-6, 3e-3, 2e-2),
    "head_linear": (1e-6, 3e-3, 2e-2),
    "rms_norm": (1e-6, 2e-3, 1e-2),
    "rope": (2e-5, 2e-3, 2e-2),  # angles of a few hundred radians are rounded to float32
    "rope_far": (2e-2, 2e-2, 3e-2),  # and of 1e5 radians: see test_far_rope
    "elementwise": (1e-6, 2e-3, 2e-2),
    "attention": (2e-6, 3e-3, 2e-2),
    "latent_attention": (2e-6, 3e-3, 2e-2),
    "short_conv": (1e-6, 3e-3, 2e-2),
    "block_conv": (1e-6, 3e-3, 2e-2),
    "parent_rows": (0, 4e-3, 3e-2),
    "gated_delta": (1e-5, 1e-2, 6e-2),  # a recurrence over all rows
    "route": (1e-6, 3e-3, 2e-2),
    "top_k": (2e-5, 3e-3, 2e-2),  # a float32 sum over the vocabulary
    "moe": (3e-6, 1e-2, 6e-2),
    "moe_dense": (3e-6, 1e-2, 6e-2),
}


Run = Callable[["Inputs"], list[Array]]


def array(ops: Ops, values: Any) -> Array:
    """float32 `values` as the backend's array, through an embedding, the only way that models have."""
    rows = np.asarray(values, np.float32).reshape(len(values), -1)
    return ops.embed(ops.weight(dense("rows", rows)), np.arange(len(rows), dtype=np.int32)).reshape(*np.shape(values))


@dataclass(frozen=True)
class Case:
    name: str
    op: str  # a key of TOLERANCE
    run: Run

    def __call__(self, ops: Ops) -> list[np.ndarray]:
        return [ops.read(out) for out in self.run(Inputs(ops))]


class Inputs:
    """Random numbers, equal for every backend, drawn in the order of the requests."""

    def __init__(self, ops: Ops):
        self.ops, self.random = ops, np.random.default_rng(7)

    def draw(self, *shape: int, scale: float = 1) -> np.ndarray:
        # rounded, so that each activation dtype holds them exactly
        return np.round(self.random.normal(size=shape) * scale * 32).astype(np.float32) / 32

    def rows(self, *shape: int, scale: float = 1) -> Array:
        """Activations (T, ...)"""
        return array(self.ops, self.draw(*shape, scale=scale))

    def weight(self, *shape: int) -> Any:
        return self.ops.weight(dense("weight", self.draw(*shape)))

    def packed(self, *shape: int) -> Any:
        """A matrix stored in Q8_0 blocks."""
        codes = self.random.integers(-127, 128, size=(*shape[:-1], shape[-1] // 32, 32)).astype(np.int8)
        scales = np.full((*codes.shape[:-1], 1), 2**-6, np.float16)
        blocks = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1)
        return self.ops.weight(Tensor("packed", "Q8_0", shape, blocks.reshape(*shape[:-1], -1)))

    def vector(self, *shape: int, scale: float = 1) -> Array:
        return self.ops.vector(dense("vector", self.draw(*shape, scale=scale)))

    def state(self, spec: LayerSpec) -> Any:
        return self.ops.new_state([spec], 10000)


def a_step(kind: str, T: int, start: int) -> Step:
    """A chain, a block, or a random tree of T rows."""
    tokens = np.zeros(T, np.int32)
    if kind == "tree":
        random = np.random.default_rng(T)
        return Step.tree(tokens, [int(random.integers(max(-1, t - 6), t)) for t in range(T)], start)
    return Step.chain(tokens, start) if kind == "chain" else Step.block(tokens, start)


def a_path(step: Step) -> list[int]:
    """The last row of the step and its ancestors, root first."""
    if step.parents is None:
        return list(range(len(step)))
    path, row = [], len(step) - 1
    while row >= 0:
        path.append(row)
        row = int(step.parents[row])
    return path[::-1]


# -- rows --------------------------------------------------------------------------------------------------------------


def rows_cases() -> Iterator[Case]:
    def embed(T: int) -> Run:
        return lambda i: [i.rows(T, 96)]

    def linear(T: int, shape: Sequence[int]) -> Run:
        return lambda i: [i.ops.linear(i.rows(T, shape[1]), i.weight(*shape))]

    def head_linear(T: int, shape: Sequence[int]) -> Run:
        return lambda i: [i.ops.head_linear(i.rows(T, shape[0], shape[2]), i.weight(*shape))]

    def of_two(op: str, T: int, gate: int) -> Run:
        return lambda i: [getattr(i.ops, op)(i.rows(T, 48), i.rows(T, gate, scale=4))]

    def scale(T: int) -> Run:
        return lambda i: [i.ops.scale(i.rows(T, 50)[:, 1:-1], 5.65625), i.ops.scale(i.rows(T, 48), -0.5)]

    def rms_norm(T: int) -> Run:
        return lambda i: [
            i.ops.rms_norm(i.rows(T, 96), i.vector(96), 1e-5),
            i.ops.rms_norm(i.rows(T, 3, 40), None, 1e-6),
        ]

    def gated_rms_norm(T: int) -> Run:
        return lambda i: [i.ops.gated_rms_norm(i.rows(T, 3, 16), i.vector(16), i.rows(T, 3, 16), 1e-6)]

    def block_conv(T: int, C: int, n: int, groups: int) -> Run:
        """Of rows and taps that are slices, as those of a product are."""
        return lambda i: [
            i.ops.block_conv(i.rows(T, C + 2)[:, 1:-1], i.rows(T, 2 * n * groups)[:, n * groups :], i.vector(n, C))
        ]

    for T in ROWS:
        for C, n, groups in ((48, 2, 12), (40, 3, 5)):
            yield Case(f"block_conv-{T}-{n}", "block_conv", block_conv(T, C, n, groups))
        yield Case(
            f"add-{T}-row",
            "elementwise",
            lambda i, T=T: [i.ops.add(i.rows(T, 48), i.rows(1, 48))],  # type: ignore[misc]
        )
        yield Case(
            f"add-{T}-vector",
            "elementwise",
            lambda i, T=T: [i.ops.add(i.rows(T, 48), i.vector(48))],  # type: ignore[misc]
        )
        yield Case(f"embed-{T}", "embed", embed(T))
        for shape in ((5, 3), (64, 96), (1, 160)):
            yield Case(f"linear-{T}-{shape}", "linear", linear(T, shape))
        yield Case(f"head_linear-{T}", "head_linear", head_linear(T, (3, 5, 24)))
        yield Case(f"scale-{T}", "elementwise", scale(T))
        joined = ("add", 48), ("swiglu", 48), ("geglu", 48)
        for op, gate in (*joined, ("mul_sigmoid", 48), ("mul_sigmoid", 1), ("mul_softplus", 1)):
            yield Case(f"{op}-{T}-{gate}", "elementwise", of_two(op, T, gate))
        yield Case(f"rms_norm-{T}", "rms_norm", rms_norm(T))
        yield Case(f"gated_rms_norm-{T}", "rms_norm", gated_rms_norm(T))
    yield Case("linear-slice", "linear", lambda i: [i.ops.linear(i.rows(7, 96)[2:5, 32:64], i.weight(5, 32))])


def rope_cases() -> Iterator[Case]:
    def rotate(op: str, T: int, D: int, positions: np.ndarray, rope: Rope) -> Run:
        if op == "norm_rope":
            return lambda i: [i.ops.norm_rope(i.rows(T, 3, D), i.vector(D), positions, rope, 1e-6)]
        return lambda i: [i.ops.rope(i.rows(T, 5, D)[:, 1:4], positions, rope)]

    for D, dim, magnitude in ((64, 64, 1.0), (64, 16, 1.0), (32, 24, 1.3)):
        rope = Rope(tuple(1e4 ** (-2 * j / dim) for j in range(dim // 2)), magnitude)
        for T in ROWS:
            for kind, positions in (
                ("chain", np.arange(300, 300 + T)),
                ("tree", a_step("tree", T, 300).positions),
                ("any", np.random.default_rng(T).permutation(300)[:T]),
            ):
                for op in ("rope", "norm_rope"):
                    run = rotate(op, T, D, positions.astype(np.int32), rope)
                    yield Case(f"{op}-{D}-{dim}-{T}-{kind}", "rope", run)
            yield Case(f"rope-{D}-{dim}-{T}-far", "rope_far", rotate("rope", T, D, np.arange(10**5, 10**5 + T), rope))


# -- ops with a state: rows before, a step, its commit, and a row after ------------------------------------------------


def stateful(spec: LayerSpec, past: int, kind: str, T: int, call: Callable[[Inputs, Any, Step], Array]) -> Run:
    def run(i: Inputs) -> list[Array]:
        state, out = i.state(spec), []
        layer = state[0].state if "state" in spec else state[0]
        if past:
            call(i, layer, Step.chain(np.zeros(past, np.int32), 0))
            state.commit(np.arange(past))
        step = a_step(kind, T, past)
        out.append(call(i, layer, step))
        state.commit(a_path(step))
        if kind != "block":
            out.append(call(i, layer, Step.chain(np.zeros(2, np.int32), state.length)))
        return out

    return run


def attention_cases() -> Iterator[Case]:
    def attend(
        H: int, K: int, D: int, Dv: int, window: int | None, causal: bool = False, sinks: float | None = None
    ) -> Callable[[Inputs, Any, Step], Array]:
        def call(i: Inputs, kv: Any, step: Step) -> Array:
            T = len(step)
            rows = i.rows(T, H, D), i.rows(T, K, D), i.rows(T, K, Dv)
            ordered = causal and step.parents is None
            logits = None if sinks is None else i.ops.vector(dense("sinks", sinks + np.arange(H)))
            return i.ops.attention(*rows, kv, step, D**-0.5, window, ordered, sink_logits=logits)

        return call

    def kept(window: int | None, K: int, D: int, Dv: int) -> LayerSpec:
        return {"state": KVSpec(K, D, Dv) if window is None else KVSpec(K, D, Dv, window)}

    def written(i: Inputs, kv: Any, step: Step) -> Array:
        """Steps: rows that only leave keys and values, then two that read them."""
        if len(step) != 2:
            k = i.rows(len(step), 2, 16)
            i.ops.write_kv(k, i.rows(len(step), 2, 16), kv, step)
            return k
        return attend(6, 2, 16, 16, None)(i, kv, step)

    def case(past: int, kind: str, T: int, H: int, K: int, D: int, Dv: int, window: int | None, spec: str) -> Case:
        layer = kept(window if spec == "window" else None, K, D, Dv)
        run = stateful(layer, past, kind, T, attend(H, K, D, Dv, window))
        return Case(f"attention-{spec}{window or ''}-past{past}-{kind}{T}-{H}.{K}.{D}.{Dv}", "attention", run)

    for past in PASTS:
        for kind in ("chain", "tree", "block"):
            for T in ROWS:
                yield case(past, kind, T, 6, 2, 16, 16, None, "kv")
    for causal in (False, True):
        for past in (0, 5, 257):
            for T in (1, 7, 33):
                for spec, window in (("kv", None), ("kv", 8), ("window", 8)):
                    call = attend(4, 2, 16, 16, window, causal=causal)
                    run = stateful(kept(window if spec == "window" else None, 2, 16, 16), past, "block", T, call)
                    yield Case(f"attention-{spec}{window or ''}-past{past}-block{T}-{causal}", "attention", run)
    for spec in ("kv", "window"):
        for window in (1, 8):
            for past in (0, 5, 257):
                for kind in ("chain", "tree"):
                    for T in (1, 7, 33):
                        yield case(past, kind, T, 4, 2, 16, 16, window, spec)
    for past in (0, 257):
        for T in (7, 33):
            yield Case(
                f"write_kv-past{past}-{T}", "attention", stateful(kept(None, 2, 16, 16), past, "chain", T, written)
            )
    for sinks in (-40.0, 0.0, 6.0):  # without a share, beside the scores, and most of the softmax
        for past, kind, T in ((0, "chain", 1), (5, "tree", 7), (257, "chain", 33), (257, "tree", 7), (9, "chain", 140)):
            for spec, window in (("kv", None), ("window", 8)):
                call = attend(8, 2, 64, 64, window, sinks=sinks)
                run = stateful(kept(window, 2, 64, 64), past, kind, T, call)
                yield Case(f"attention-{spec}-past{past}-{kind}{T}-sinks{sinks:g}", "attention", run)
    yield case(7, "chain", 7, 3, 3, 24, 8, None, "kv")
    yield case(7, "tree", 7, 8, 1, 64, 64, None, "kv")
    yield case(7, "chain", 140, 4, 2, 64, 64, None, "kv")
    yield case(7, "chain", 140, 4, 2, 80, 80, None, "kv")


def latent_cases() -> Iterator[Case]:
    H, R, P, N, V = 3, 16, 8, 12, 10

    def latent(i: Inputs, kv: Any, step: Step) -> Array:
        T = len(step)
        q, q_rope, rows, k_rope = i.rows(T, H, R), i.rows(T, H, P), i.rows(T, R), i.rows(T, P)
        return i.ops.latent_attention(q, q_rope, rows, k_rope, kv, step, scale=0.2)

    def expanded(i: Inputs, kv: Any, step: Step) -> Array:
        T = len(step)
        q, q_rope, rows, k_rope = i.rows(T, H, N), i.rows(T, H, P), i.rows(T, R), i.rows(T, P)
        ups = LatentWeights(i.weight(H, R, N), i.weight(H, V, R))
        return i.ops.expanded_attention(q, q_rope, rows, k_rope, ups, kv, step, scale=0.05)

    for past in (0, 256):
        for kind in ("chain", "tree", "block"):
            for T in (1, 7, 33):
                for name, call in (("latent", latent), ("expanded", expanded)):
                    run = stateful({"state": LatentSpec(R, P)}, past, kind, T, call)
                    yield Case(f"{name}_attention-past{past}-{kind}{T}", "latent_attention", run)


MIXERS = [  # with the number of taps
    (DeltaSpec(1, 2, 12, 16), 2),
    (DeltaSpec(2, 4, 128, 128), 4),
    (DeltaSpec(1, 2, 16, 16), 6),
    (DeltaSpec(2, 6, 128, 128, grouped=True), 4),
]


def recurrent_cases() -> Iterator[Case]:
    def conv(C: int, taps: int) -> Callable[[Inputs, Any, Step], Array]:
        def call(i: Inputs, state: Any, step: Step) -> Array:
            return i.ops.short_conv(i.rows(len(step), C + 2)[:, 1:-1], i.vector(C, taps), state, step)

        return call

    def parents(i: Inputs, state: Any, step: Step) -> Array:
        return i.ops.parent_rows(i.rows(len(step), 12)[:, 1:-1], state, step)

    def delta(Hk: int, Hv: int, Dk: int, Dv: int) -> Callable[[Inputs, Any, Step], Array]:
        def call(i: Inputs, state: Any, step: Step) -> Array:
            T = len(step)
            q, k, v = i.rows(T, Hk, Dk), i.rows(T, Hk, Dk), i.rows(T, Hv, Dv)
            a, b = i.rows(T, Hv), i.rows(T, Hv)
            decay = i.ops.vector(dense("decay", -np.exp(i.draw(Hv))))
            return i.ops.gated_delta(q, k, v, a, b, GateWeights(decay, i.vector(Hv)), state, step)

        return call

    def mixer(Hk: int, Hv: int, Dk: int, Dv: int, taps: int) -> Callable[[Inputs, Any, Step], Array]:
        def call(i: Inputs, state: Any, step: Step) -> Array:
            C, V = 2 * Hk * Dk + Hv * Dv, Hv * Dv
            y = i.rows(len(step), C + V + 2 * Hv)
            qkv, z = y[:, :C], y[:, C : C + V].reshape(len(step), Hv, Dv)
            a, b = y[:, C + V : C + V + Hv], y[:, C + V + Hv :]
            decay = i.ops.vector(dense("decay", -np.exp(i.draw(Hv))))
            weights = DeltaWeights(i.vector(C, taps), GateWeights(decay, i.vector(Hv)), i.vector(Dv), 1e-6)
            return i.ops.delta_mixer(DeltaInputs(qkv, z, a, b), weights, Hk, state.conv, state.delta, step)

        return call

    def case(past: int, kind: str, T: int, spec: DeltaSpec, taps: int) -> Case:
        Hk, Hv, Dk, Dv = sizes = sizes_of(spec)
        layer: LayerSpec = {"conv": ConvSpec(2 * Hk * Dk + Hv * Dv, taps), "delta": spec}
        run = stateful(layer, past, kind, T, mixer(*sizes, taps))
        return Case(f"delta_mixer-{named(spec)}-past{past}-{kind}{T}", "gated_delta", run)

    def sizes_of(spec: DeltaSpec) -> tuple[int, int, int, int]:
        return spec.key_heads, spec.heads, spec.key_dim, spec.value_dim

    def named(spec: DeltaSpec) -> str:
        return ".".join(map(str, sizes_of(spec))) + ("-grouped" if spec.grouped else "")

    for T in (1, 7, 33):
        yield case(5, "chain", T, DeltaSpec(1, 2, 64, 64), 4)
    for past in (0, 2, 65):
        for kind in ("chain", "tree"):
            for T in ROWS:
                for spec, taps in MIXERS:
                    yield case(past, kind, T, spec, taps)
                for taps in (2, 4):
                    run = stateful({"state": ConvSpec(10, taps)}, past, kind, T, conv(10, taps))
                    yield Case(f"short_conv-{taps}-past{past}-{kind}{T}", "short_conv", run)
                run = stateful({"state": ConvSpec(10, 2)}, past, kind, T, parents)
                yield Case(f"parent_rows-past{past}-{kind}{T}", "parent_rows", run)
                for spec in (DeltaSpec(2, 4, 32, 32), DeltaSpec(1, 3, 64, 32), DeltaSpec(2, 6, 32, 32, grouped=True)):
                    run = stateful({"state": spec}, past, kind, T, delta(*sizes_of(spec)))
                    yield Case(f"gated_delta-{named(spec)}-past{past}-{kind}{T}", "gated_delta", run)


# -- experts -----------------------------------------------------------------------------------------------------------


def expert_cases() -> Iterator[Case]:
    def softmax(T: int, E: int, k: int, scale: float | None = None) -> Run:
        return lambda i: list(i.ops.route_softmax(_distinct(i, T, E), k, scale))

    def sigmoid(T: int, E: int, k: int) -> Run:
        return lambda i: list(i.ops.route_sigmoid(_distinct(i, T, E), i.ops.vector(dense("b", np.zeros(E))), k, 2.5))

    def moe(T: int, E: int, k: int, stored: str) -> Run:
        def run(i: Inputs) -> list[Array]:
            ids, weights = i.ops.route_softmax(_distinct(i, T, E), k)
            matrix = getattr(i, stored)
            return [i.ops.moe(i.rows(T, 64), matrix(E, 2 * 32, 64), matrix(E, 64, 32), ids, weights)]

        return run

    def biased(T: int, stored: str, F: int) -> Run:
        """Of gates and ups that exceed the limit; logits are distinct."""

        def run(i: Inputs) -> list[Array]:
            E, C, matrix, vector = 6, 96, getattr(i, stored), i.ops.vector
            choice = np.stack([i.random.permutation(E) for _ in range(T)])
            rows = array(i.ops, np.concatenate([choice, i.draw(T, C - E)], axis=1))
            router = i.ops.weight(dense("router", np.eye(E, C)))
            of_router = vector(dense("biases", np.arange(E) / 8))
            biases = ExpertBiases(of_router, i.vector(E, F), i.vector(E, F), i.vector(E, C), 7.0)
            return [i.ops.moe_ffn(rows, ExpertWeights(router, matrix(E, 2 * F, C), matrix(E, C, F), biases=biases), 4)]

        return run

    for T in ROWS:
        for stored in ("packed", "weight"):
            op = "moe" if stored == "packed" else "moe_dense"
            yield Case(f"moe_biased-{T}-{stored}", op, biased(T, stored, 64))
        for E, k in ((8, 2), (5, 5), (64, 7)):
            yield Case(f"route_softmax-{T}-{E}-{k}", "route", softmax(T, E, k))
            yield Case(f"route_softmax-{T}-{E}-{k}-scaled", "route", softmax(T, E, k, 2.5))
            yield Case(f"route_sigmoid-{T}-{E}-{k}", "route", sigmoid(T, E, k))
            yield Case(f"moe-{T}-{E}-{k}", "moe", moe(T, E, k, "packed"))
            yield Case(f"moe-{T}-{E}-{k}-dense", "moe_dense", moe(T, E, k, "weight"))


def top_k_cases() -> Iterator[Case]:
    def run(T: int, V: int, k: int) -> Run:
        def call(i: Inputs) -> list[Array]:
            ranks = np.stack([i.random.permutation(V) for _ in range(T)])
            values = np.maximum(ranks - V + 128, 0).astype(np.float32) / 16 - 1  # the best 128 differ in any dtype
            logits = i.ops.embed(i.ops.weight(dense("logits", values)), np.arange(T, dtype=np.int32))
            return list(i.ops.top_k(logits, k))

        return call

    for T in (1, 15, 33):
        for V, k in ((5, 5), (96, 1), (1000, 8), (5000, 64)):
            yield Case(f"top_k-{T}-{V}-{k}", "top_k", run(T, V, k))


def _distinct(i: Inputs, T: int, E: int) -> Array:
    """Logits that no rounding makes equal, so that the order of experts is the same everywhere."""
    values = np.stack([i.random.permutation(E) for _ in range(T)]).astype(np.float32) / 16 - 1
    return i.ops.embed(i.ops.weight(dense("logits", values)), np.arange(T, dtype=np.int32))


CASES = [
    *rows_cases(),
    *rope_cases(),
    *attention_cases(),
    *latent_cases(),
    *recurrent_cases(),
    *expert_cases(),
    *top_k_cases(),
]
