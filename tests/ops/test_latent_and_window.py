"""Latent attention, windows that drop rows, sigmoid routing: against loops over rows, heads and experts in float64."""

import numpy as np
import pytest
from cases import array
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ops import LatentWeights
from common.reference import NumpyOps
from common.step import MAX_DECODE_ROWS, PAST, Step
from common.storage import KVSpec, LatentSpec, state_bytes
from common.weights import dense

TOLERANCE = 1e-5
H, N, P, R, V = 3, 10, 6, 16, 12
quick = settings(max_examples=15, derandomize=True)
parent_lists = st.integers(1, 7).flatmap(lambda n: st.tuples(*(st.integers(PAST, t - 1) for t in range(n))))


def ancestors(step, row):
    return np.flatnonzero(step.visible[row])


def path_to(step, row):
    return [] if row == PAST else [*path_to(step, int(step.parents[row])), row]


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


# -- rows of a long step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("past", "window", "sinks"), [(0, None, 0), (70, None, 0), (70, 40, 0), (300, 40, 3)])
def test_long_steps_attend_as_single_rows_do(past, window, sinks):
    """A prompt, whose rows attend together, against its rows one after the other."""
    random, ops, T = np.random.default_rng(3), NumpyOps(), MAX_DECODE_ROWS + 20
    spec = [{"kv": KVSpec(2, 8, 8, window, sinks)}]
    whole, single = ops.new_state(spec, 600), ops.new_state(spec, 600)

    def attended(state, rows, length):
        return ops.attention(*rows, state[0].kv, Step.chain(np.zeros(len(rows[0]), np.int32), length), 0.3, window)

    before, rows = ([random.normal(size=(n, heads, 8)).astype(np.float32) for heads in (6, 2, 2)] for n in (past, T))
    for state in (whole, single):
        for t in range(past):
            attended(state, [x[t : t + 1] for x in before], t)
            state.commit([0])
    together = attended(whole, rows, past)
    for t in range(T):
        alone = attended(single, [x[t : t + 1] for x in rows], past + t)
        single.commit([0])
        assert np.abs(together[t] - alone[0]).max() <= 1e-6


# -- latent attention --------------------------------------------------------------------------------------------------


class Latent:
    """Random rows, and the attention over them with every key and value written out."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.normal = lambda *shape: random.normal(size=shape).astype(np.float32)
        self.k_up, self.v_up = self.normal(H, R, N), self.normal(H, V, R)
        self.past = np.empty((0, R + P))

    def rows(self, T):
        return self.normal(T, H, N), self.normal(T, H, P), self.normal(T, R), self.normal(T, P)

    def expected(self, step, q_nope, q_rope, latent, k_rope, scale):
        rows = np.concatenate([self.past, np.concatenate([latent, k_rope], axis=-1)])
        out = np.empty((len(step), H, V))
        for t in range(len(step)):
            seen = rows[np.r_[: len(self.past), len(self.past) + ancestors(step, t)]].astype(np.float64)
            for h in range(H):
                keys = np.concatenate([seen[:, :R] @ self.k_up[h], seen[:, R:]], axis=-1)
                values = seen[:, :R] @ self.v_up[h].T
                out[t, h] = softmax(keys @ np.concatenate([q_nope[t, h], q_rope[t, h]]) * scale) @ values
        return out

    def computed(self, ops, kv, step, form, q_nope, q_rope, latent, k_rope, scale):
        q_nope, q_rope, latent, k_rope = (array(ops, x) for x in (q_nope, q_rope, latent, k_rope))
        k_up, v_up = (ops.weight(dense("up", w)) for w in (self.k_up, self.v_up))
        if form == "expanded":
            return ops.expanded_attention(q_nope, q_rope, latent, k_rope, LatentWeights(k_up, v_up), kv, step, scale)
        q_latent = ops.head_linear(q_nope, k_up)
        return ops.head_linear(ops.latent_attention(q_latent, q_rope, latent, k_rope, kv, step, scale), v_up)


@pytest.mark.parametrize("form", ["latent", "expanded"])
def test_latent_attention(ops, form):
    """Chains, trees and a block, after commits of whole chains and of paths."""
    latent, state = Latent(1), ops.new_state([{"kv": LatentSpec(R, P)}], 100)
    tokens = np.zeros(9, np.int32)
    for step, path in [
        (Step.chain(tokens[:5], 0), range(5)),
        (Step.tree(tokens[:7], [PAST, PAST, 0, 1, 2, 2, 4], 5), [0, 2, 4, 6]),
        (Step.chain(tokens[:1], 9), [0]),
        (Step.block(tokens[:4], 10), []),
        (Step.chain(tokens, 10), [0, 1]),
        (Step.chain(tokens[:3], 12), []),
    ]:
        rows = latent.rows(len(step))
        out = ops.read(latent.computed(ops, state[0].kv, step, form, *rows, 0.3))
        want = latent.expected(step, *rows, 0.3)
        assert np.abs(out - want).max() < TOLERANCE * np.abs(want).max()
        state.commit(path)
        latent.past = np.concatenate([latent.past, np.concatenate(rows[2:], axis=-1)[list(path)]])


def test_latent_state_is_one_row_per_token():
    from common.reference import NumpyOps

    ops, latent, spec = NumpyOps(), Latent(2), [{"kv": LatentSpec(R, P)}]
    state = ops.new_state(spec, 100)
    latent.computed(ops, state[0].kv, Step.chain(np.zeros(40, np.int32), 0), "latent", *latent.rows(40), 1.0)
    state.commit(range(40))
    assert state.nbytes == state_bytes(spec, 40, 4) == 40 * (R + P) * 4


# -- a window that drops rows ------------------------------------------------------------------------------------------

moves = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 20)),
    st.tuples(st.just("tree"), parent_lists, st.integers(PAST, 6)),
    st.tuples(st.just("snapshot")),
    st.tuples(st.just("restore"), st.integers(0, 3)),
)


@quick
@given(history=st.lists(moves, min_size=2, max_size=9), window=st.sampled_from([1, 2, 6]))
def test_window_drops_what_is_never_seen(ops, history, window):
    """After any history, a state of the last rows attends as a state of all rows does under the same window."""
    random, length = np.random.default_rng(3), 0
    specs = KVSpec(2, 8, 4), KVSpec(2, 8, 4, window)
    states, saved = [ops.new_state([{"kv": spec}], 1000) for spec in specs], []
    for move, *rest in (*history, ("read", 2)):
        if move in ("read", "tree"):
            step = (
                Step.chain(np.zeros(rest[0], np.int32), length)
                if move == "read"
                else Step.tree(np.zeros(len(rest[0]), np.int32), rest[0], length)
            )
            q, k, v = (random.normal(size=(len(step), *size)) for size in ((4, 8), (2, 8), (2, 4)))
            out, windowed = (
                ops.read(ops.attention(*(array(ops, x) for x in (q, k, v)), s[0].kv, step, scale=0.5, window=window))
                for s in states
            )
            np.testing.assert_allclose(windowed, out, atol=TOLERANCE)
            path = path_to(step, min(rest[1], len(step) - 1)) if move == "tree" else range(len(step))
            for state in states:
                state.commit(path)
            length += len(path)
        elif move == "snapshot":
            saved.append((length, [state.snapshot() for state in states]))
        elif saved:
            length, snapshots = saved[rest[0] % len(saved)]
            for state, snapshot in zip(states, snapshots, strict=True):
                state.restore(snapshot)
            saved = [(kept, s) for kept, s in saved if kept <= length]


@quick
@given(history=st.lists(moves, min_size=2, max_size=9), window=st.sampled_from([1, 2, 6]), sinks=st.integers(1, 9))
def test_first_rows_are_kept(ops, history, window, sinks):
    """Equal scores, and values that name their position: a row's output shows which positions it saw."""
    state, saved, held = ops.new_state([{"kv": KVSpec(1, 4, 64, window, sinks)}], 1000), [], 0
    names = np.eye(64)
    for move, *rest in (*history, ("read", 2)):
        length = state.length
        if move in ("read", "tree") and length < 40:
            step = (
                Step.chain(np.zeros(rest[0], np.int32), length)
                if move == "read"
                else Step.tree(np.zeros(len(rest[0]), np.int32), rest[0], length)
            )
            T = len(step)
            q, k, v = (array(ops, x) for x in (np.zeros((T, 1, 4)), np.zeros((T, 1, 4)), names[step.positions, None]))
            out = ops.read(ops.attention(q, k, v, state[0].kv, step, 1.0, window))[:, 0]
            for t, position in enumerate(step.positions):
                line = [*range(length), *step.positions[ancestors(step, t)]]
                seen = [p for p in line if p < sinks or p > position - window]
                np.testing.assert_allclose(out[t], names[seen].mean(axis=0), atol=TOLERANCE)
            state.commit(path_to(step, min(rest[1], T - 1)) if move == "tree" else range(T))
        elif move == "snapshot":
            saved.append((length, state.snapshot()))
        elif move == "restore" and saved:
            back, snapshot = saved[rest[0] % len(saved)]
            state.restore(snapshot)
            saved = [(kept, s) for kept, s in saved if kept <= back]
        held = max(held, state.nbytes)
    assert held <= (sinks + 2 * window + 20 + 256 + 20) * 68 * 4


@pytest.mark.parametrize("window", [1, 5, 64])
def test_window_bounds_bytes(ops, window):
    """Ten windows of steps take as much memory as two; counted rows are those of the window alone."""
    spec = [{"kv": KVSpec(1, 4, 4, window)}]
    assert state_bytes(spec, 10 * window, 2) == state_bytes(spec, window, 2) == window * 16
    state, held = ops.new_state(spec, 10000), []
    for start in range(0, 2000, 8):
        q = array(ops, np.ones((8, 1, 4)))
        ops.read(ops.attention(q, q, q, state[0].kv, Step.chain(np.zeros(8, np.int32), start), 1.0, window=window))
        state.commit(range(8))
        held.append(state.nbytes)
    assert max(held[len(held) // 2 :]) <= max(held[: len(held) // 2])
    assert held[-1] <= (2 * window + 8 + 256) * 8 * 4  # what is committed, a step, and room to grow


# -- experts and gates -------------------------------------------------------------------------------------------------


def test_route_sigmoid(ops):
    """The bias decides which experts are chosen, and is in no weight."""
    random = np.random.default_rng(4)
    logits, bias = random.normal(size=(200, 16)), np.round(random.normal(size=16), 2)
    ids, weights = (ops.read(x) for x in ops.route_sigmoid(array(ops, logits), ops.vector(dense("b", bias)), 4, 2.5))
    p = 1 / (1 + np.exp(-logits.astype(np.float32).astype(np.float64)))
    unbiased = 0
    for t in range(200):
        best = np.argsort(-(p[t] + bias))[:4]
        unbiased += set(best) == set(np.argsort(-p[t])[:4])
        assert set(ids[t]) == set(best)
        np.testing.assert_allclose(weights[t], 2.5 * p[t, ids[t]] / p[t, best].sum(), rtol=1e-5)
    assert unbiased < 100  # the bias matters


def test_mul_softplus(ops):
    gates = np.array([-100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 100.0, 3e4])
    x = np.full((len(gates), 2, 3), 2.0)
    out = ops.read(ops.mul_softplus(array(ops, x), array(ops, np.repeat(gates, 2).reshape(-1, 2, 1))))
    want = 2 * np.where(gates > 0, gates + np.log1p(np.exp(-np.abs(gates))), np.log1p(np.exp(np.minimum(gates, 0))))
    np.testing.assert_allclose(out, np.broadcast_to(want[:, None, None], out.shape), rtol=1e-5, atol=1e-30)
