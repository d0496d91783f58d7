"""Compressed caches: attention over what they hold, however rows came, for every pair of formats.

What a row reads depends on positions alone. So rows of a tree agree with their path read alone, and a sequence read in
any pieces leaves the same bytes; on NumPy bit for bit.
"""

from dataclasses import replace

import numpy as np
import pytest
from cases import array
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BimetalError, UsageError
from common.kv_cache import CALIBRATION, RECENT, SINKS, CacheOptions, check_pairs, packed, with_window
from common.kv_formats import FORMATS
from common.step import PAST, Step
from common.storage import NATIVE, ConvSpec, Kind, KVSpec, LatentSpec, Packing, state_bytes

H, K, D = 4, 2, 64
SCALE = 0.125
PAIRS = [(keys, values) for keys in (NATIVE, *FORMATS) for values in (NATIVE, *FORMATS)][1:]
FEW_PAIRS = [("q8_0", "lm4"), ("lm4", "lm3"), ("tq3_0", "tq3_0"), ("q4_0", "q5_1"), ("turboquant", "turboquant")]
OTHERS = [pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in FEW_PAIRS]
EACH_FORMAT = [*zip((NATIVE, *FORMATS), (*FORMATS, NATIVE), strict=True)]  # as keys and as values
EACH_THEN_OTHERS = [pair if pair in EACH_FORMAT else pytest.param(pair, marks=pytest.mark.slow) for pair in PAIRS]
quick = settings(max_examples=10, derandomize=True)
parent_lists = st.integers(1, 7).flatmap(lambda n: st.tuples(*(st.integers(PAST, t - 1) for t in range(n))))


def spec_of(pair, **packing):
    """The default packing of a pair, with the given counts in place of its own."""
    options = CacheOptions(*pair, **{"calibration": 6, "sinks": 2, "recent": 3, **packing})
    return packed([{"kv": KVSpec(K, D, D)}], options)[0]["kv"]


def rows_at(places, seed=0):
    """q, k, v of tokens: the same for the same token, whenever it is read."""
    made = [np.random.default_rng([seed, int(place)]) for place in places]
    q, k, v = (np.stack([m.standard_normal(size) for m in made]) for size in ((H, D), (K, D), (K, D)))
    return q, k * np.where(np.arange(D) == 5, 8, 1) + 3 * (np.arange(D) == 9), v


def attend(ops, state, step, **window):
    q, k, v = rows_at(np.asarray(step.tokens))
    arrays = [array(ops, x) for x in (q, k, v)]
    return np.array(ops.read(ops.attention(*arrays, state[0].kv, step, SCALE, **window)))


def chain(tokens, start):
    return Step.chain(np.asarray(tokens, np.int32), start)


def read(ops, state, tokens, pieces=(), **window):
    """Outputs of `tokens` read in steps of the given sizes, the rest in one."""
    out, at = [], 0
    for size in (*pieces, len(tokens)):
        part = tokens[at : at + size]
        if len(part):
            out.append(attend(ops, state, chain(part, state.length), **window))
            state.commit(range(len(part)))
            at += len(part)
    return np.concatenate(out)


def new(ops, spec):
    return ops.new_state([{"kv": spec}], 1000)


def close(ops, one, other):
    """Equal bits on NumPy; elsewhere as near as another order of additions allows."""
    if ops.name == "numpy":
        return np.array_equal(one, other)
    return np.abs(one - other).max() < 2e-4


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
@pytest.mark.few(56)
def test_every_pair_in_any_pieces(ops, pair):
    tokens = np.arange(30)
    whole, parts = (new(ops, spec_of(pair)) for _ in range(2))
    expected = read(ops, whole, tokens)
    assert close(ops, read(ops, parts, tokens, [1, 7, 1, 1, 9]), expected)
    assert close(ops, read(ops, parts, tokens[:4]), read(ops, whole, tokens[:4]))
    assert np.isfinite(expected).all()


@quick
@given(parents=parent_lists, past=st.integers(0, 12), pair=st.sampled_from(FEW_PAIRS))
@pytest.mark.few(1)
def test_rows_of_a_tree_agree_with_their_paths(ops, parents, past, pair):
    """Also where the tree passes the tokens that calibrate, the sinks and the recent window."""
    agree_with_their_paths(ops, parents, past, pair)


@pytest.mark.parametrize("pair", OTHERS, ids="/".join)
def test_rows_of_a_tree_of_every_pair(ops, pair):
    agree_with_their_paths(ops, [PAST, 0, 0, 1, PAST, 3], 4, pair)


def agree_with_their_paths(ops, parents, past, pair):
    tokens = 100 + np.arange(len(parents), dtype=np.int32)
    state = new(ops, spec_of(pair))
    if past:
        read(ops, state, np.arange(past))
    tree = Step.tree(tokens, parents, past)
    out = attend(ops, state, tree)
    before = state.snapshot()
    for row in range(len(parents)):
        path = [row]
        while parents[path[0]] != PAST:
            path.insert(0, parents[path[0]])
        alone = new(ops, spec_of(pair))
        if past:
            read(ops, alone, np.arange(past))
        assert close(ops, out[path], read(ops, alone, tokens[path], [1] * len(path)))
        state.restore(before)
        attend(ops, state, tree)
        state.commit(path)
        more = np.arange(200, 212)
        assert close(ops, read(ops, state, more, [1, 1]), read(ops, alone, more))
        state.restore(before)


@pytest.mark.parametrize("pair", [*FEW_PAIRS, *OTHERS], ids="/".join)
@pytest.mark.parametrize("past", [3, 6, 40])
def test_snapshots_and_what_was_not_committed(ops, pair, past):
    """A restore, and rows of NaN that were never committed, leave no trace."""
    state, alone = (new(ops, spec_of(pair)) for _ in range(2))
    for s in (state, alone):
        read(ops, s, np.arange(past))
    before = state.snapshot()
    read(ops, state, np.arange(300, 320))
    state.restore(before)
    bad = [array(ops, np.full((9, heads, D), np.nan)) for heads in (H, K, K)]
    ops.read(ops.attention(*bad, state[0].kv, chain(np.arange(9), past), SCALE))
    state.commit([])
    assert close(ops, read(ops, state, np.arange(20), [1, 3]), read(ops, alone, np.arange(20)))


@pytest.mark.parametrize("pair", EACH_THEN_OTHERS, ids="/".join)
def test_windows_over_three_wraps(ops, pair):
    """A cache of the first rows and the last ones attends as a cache of all does, under the same window."""
    few = with_window(spec_of(pair), 8, 4)
    every = replace(few, window=None, sinks=0)
    states = [new(ops, spec) for spec in (few, every)]
    tokens = np.arange(12)
    one, other = (read(ops, state, tokens, [5, 1], window=8) for state in states)
    assert close(ops, one[:8], other[:8])
    q, k, v = (np.concatenate([rows_at(range(40))[i]]) for i in range(3))
    keys, values = (ops_coded(x, plane) for x, plane in zip((k, v), few.planes, strict=True))
    out = read(ops, new(ops, few), np.arange(40), [3, 1, 7, 1, 1, 9], window=8)
    for t in range(40):
        seen = [j for j in range(t + 1) if j < 4 or j > t - 8]
        expected = exact_attention(q[t], keys[seen], values[seen])
        np.testing.assert_allclose(out[t], expected, atol=2e-4)


def ops_coded(x, plane):
    from common.reference_rows import decoded, encoded

    x = x.astype(np.float32)
    return decoded(encoded(x, plane), plane).astype(np.float64)


def exact_attention(q, keys, values):
    """One row in float64: q (H, D), keys and values (n, K, D) -> (H, D)"""
    keys, values = (np.repeat(x, H // K, axis=1) for x in (keys, values))
    scores = np.einsum("hd,nhd->hn", q, keys) * SCALE
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", p / p.sum(axis=1, keepdims=True), values)


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="/".join)
def test_what_a_row_reads(ops, pair):
    """First and recent tokens exactly, those between from their codes, of keys with the calibration undone."""
    spec = spec_of(pair, calibration=7)
    q, k, v = rows_at(range(25))
    turns = q[:7].reshape(7, K, H // K, D)[np.arange(7), :, np.arange(7) % (H // K)]
    mean, scale = k[:7].mean(axis=0), np.sqrt(k[:7].std(axis=0) / np.sqrt(np.square(turns).mean(axis=0)))
    keys = ops_coded((k - mean) / scale, spec.planes[0]) * scale + mean
    values = ops_coded(v, spec.planes[1])
    out = read(ops, new(ops, spec), np.arange(25), [10])
    for t in range(25):
        exact = np.array([j < 7 or j > t - 3 for j in range(t + 1)])[:, None, None]
        seen = [np.where(exact, x[: t + 1], coded[: t + 1]) for x, coded in ((k, keys), (v, values))]
        np.testing.assert_allclose(out[t], exact_attention(q[t], *seen), atol=2e-3)


@pytest.mark.parametrize("format_", ["q8_0", "lm4", "tq3_0", "q4_0"])
def test_latent_rows(ops, format_):
    """The latent part is coded, the roped part is not; rows agree with a row at a time."""
    R, P = 128, 16
    (layer,) = packed([{"kv": LatentSpec(R, P)}], CacheOptions(format_, format_))
    outs = []
    for pieces in ([1] * 20, [20], [4, 16]):
        state, at, out = ops.new_state([layer], 100), 0, []
        for size in pieces:
            made = [np.random.default_rng([9, t]) for t in range(at, at + size)]
            shapes = (3, R), (3, P), (R,), (P,)
            rows = [array(ops, np.stack([m.standard_normal(s) for m in made])) for s in shapes]
            out.append(ops.read(ops.latent_attention(*rows, state[0].kv, chain(range(size), at), SCALE)))
            state.commit(range(size))
            at += size
        outs.append(np.concatenate(out))
    assert close(ops, outs[0], outs[1])
    assert close(ops, outs[0], outs[2])
    assert state.nbytes >= state_bytes([layer], 20, ops.item_bytes)


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="/".join)
@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (5, 8), (40, 16), (600, 512)])
def test_bytes_are_predicted(ops, pair, tokens, rows):
    spec = spec_of(pair)
    state = new(ops, spec)
    for start in range(0, tokens, rows):
        count = min(rows, tokens - start)
        k = array(ops, np.ones((count, K, D)))
        ops.write_kv(k, k, state[0].kv, chain(range(count), start))
        state.commit(range(count))
    assert state.nbytes == ops.held_state_bytes([{"kv": spec}], tokens, rows)
    assert state_bytes([{"kv": spec}], tokens, ops.item_bytes) <= state.nbytes


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_bytes_per_token():
    """Keys and values of a head of 128, in bytes: the sizes that the formats promise."""
    sizes = {("q8_0", "q8_0"): 272, ("q8_0", "lm4"): 202, ("lm4", "lm4"): 132, ("lm3", "lm3"): 100, ("f16", "f16"): 512}
    for pair, size in (sizes | {("turboquant", "turboquant"): 118}).items():
        (layer,) = packed([{"kv": KVSpec(1, 128, 128)}], CacheOptions(*pair))
        assert layer["kv"].row_bytes(4) == size, pair


def test_defaults_of_formats():
    def packing(keys, values):
        return packed([{"kv": KVSpec(1, 128, 128)}], CacheOptions(keys, values))[0]["kv"].packing

    assert packing("q8_0", "q8_0") == packing("f16", "q8_0") == Packing()
    assert packing("f16", "q5_0") == Packing(sinks=SINKS, recent=RECENT)
    assert packing("q8_0", "lm4") == Packing(rotate_values=True, sinks=SINKS, recent=RECENT)
    assert packing("q4_0", "q4_0") == Packing(True, False, SINKS, RECENT, CALIBRATION)
    assert packing("lm4", "lm4") == packing("tq3_0", "tq3_0") == Packing(True, True, SINKS, RECENT, CALIBRATION)


def test_boundary_layers_are_counted_among_those_with_a_cache():
    conv, kv = {"conv": ConvSpec(8, 4)}, {"kv": KVSpec(1, 128, 128)}
    spec = packed([conv, kv, conv, kv, kv, kv, conv], CacheOptions("lm4", "tq3_0", boundary=1))
    formats = [(s.key_format, s.value_format) for layer in spec for s in layer.values() if s.kind is Kind.APPENDS]
    assert formats == [("q8_0", "q8_0"), ("lm4", "tq3_0"), ("lm4", "tq3_0"), ("q8_0", "q8_0")]
    assert spec[0] == conv


def test_windows_take_keys_of_8_bits():
    (layer,) = packed([{"kv": KVSpec(1, 128, 128, 512)}], CacheOptions("tq3_0", "tq3_0"))
    assert (layer["kv"].key_format, layer["kv"].value_format) == ("q8_0", "tq3_0")
    assert not layer["kv"].packing.keeps_exact


def test_refusals():
    pairs = frozenset({("q8_0", "q8_0"), ("q8_0", "lm4"), ("lm4", "lm4")})
    spec = packed([{"kv": KVSpec(1, 128, 128)}], CacheOptions("lm4", "q8_0"))
    with pytest.raises(UsageError, match=r"keys in lm4 and values in q8_0; supported: q8_0 / q8_0 lm4; lm4 / lm4"):
        check_pairs(spec, "some", pairs)
    with pytest.raises(BimetalError, match="multiple of 32, not 80"):
        check_pairs(packed([{"kv": KVSpec(1, 80, 80)}], CacheOptions("lm4", "lm4")), "some", pairs)
    with pytest.raises(UsageError, match="heads of 80 cannot be rotated"):
        check_pairs(
            packed([{"kv": KVSpec(1, 80, 80)}], CacheOptions("f16", "f16", rotate_keys=True)), "numpy", {("f16", "f16")}
        )
    with pytest.raises(UsageError, match="takes one format"):
        packed([{"kv": LatentSpec(128, 16)}], CacheOptions("q8_0", "lm4"))


# -- saved on the host -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", EACH_THEN_OTHERS, ids="/".join)
@pytest.mark.few(8)
def test_saved_and_loaded(ops, pair):
    """Codes, exact rows and calibration come back to the bit."""
    check_saved_and_loaded(ops, pair, "exact")


@pytest.mark.parametrize("pair", FEW_PAIRS, ids="/".join)
@pytest.mark.parametrize("kind", ["coded", "window"])
@pytest.mark.few(6)
def test_codes_alone_and_windows_saved_and_loaded(ops, pair, kind):
    """Also where a window has wrapped and wraps elsewhere."""
    check_saved_and_loaded(ops, pair, kind)


def check_saved_and_loaded(ops, pair, kind):
    spec = spec_of(pair)
    if kind == "coded":
        spec = replace(spec, packing=replace(spec.packing, sinks=0, recent=0, calibration=0))
    elif kind == "window":
        spec = with_window(spec, 8, 4)
    how = {"window": 8} if kind == "window" else {}
    for length in (5, 40):  # before and after the calibration
        state, other = new(ops, spec), new(ops, spec)
        read(ops, state, np.arange(length), [1, 2, 9], **how)
        read(ops, other, np.arange(50, 73), [4], **how)
        saved = state.save()
        other.load(saved, length)
        more = np.arange(100, 130)
        expected = read(ops, state, more, [1, 1, 11], **how)
        assert np.array_equal(read(ops, other, more, [1, 1, 11], **how), expected)
        one, two = state.save(), other.save()
        assert all(np.array_equal(one[name], two[name]) for name in one)
