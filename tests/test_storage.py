"""What each kind of state says it stores."""

import pytest

from common.storage import ConvSpec, DeltaSpec, Kind, KVSpec, LatentSpec, Plane, grows, state_bytes

KV = KVSpec(4, 128, 64)
WINDOW = KVSpec(4, 128, 64, 512, 4)
LATENT = LatentSpec(512, 64)
CONV = ConvSpec(1000, 4)
DELTA = DeltaSpec(2, 8, 128, 64)


@pytest.mark.parametrize(
    ("spec", "kind", "row_bytes", "at_3000"),
    [
        (KV, Kind.APPENDS, 4 * 192 * 2, 3000 * 4 * 192 * 2),
        (WINDOW, Kind.WRAPS, 4 * 192 * 2, 516 * 4 * 192 * 2),
        (LATENT, Kind.APPENDS, 576 * 2, 3000 * 576 * 2),
    ],
)
def test_rows(spec, kind, row_bytes, at_3000):
    assert (spec.kind, spec.row_bytes(2), spec.bytes(3000, 2)) == (kind, row_bytes, at_3000)
    assert spec.bytes(0, 2) == 0
    assert spec.bytes(1, 2) == row_bytes
    assert grows(spec)


def test_recurrent_states_keep_their_size():
    assert CONV.bytes(0, 2) == CONV.bytes(9999, 2) == 3 * 1000 * 2
    assert DELTA.bytes(0, 2) == DELTA.bytes(9999, 4) == 8 * 128 * 64 * 4
    assert not grows(CONV)
    assert not grows(DELTA)


def test_state_bytes_is_the_sum_over_layers():
    layers = [{"kv": KV}, {"conv": CONV, "delta": DELTA}]
    assert state_bytes(layers, 7, 2) == sum(s.bytes(7, 2) for s in (KV, CONV, DELTA))


def test_planes_of_keys_and_values_differ_in_width():
    assert KV.planes == (Plane(4, 128), Plane(4, 64))
    assert KV.numbers == 4 * 192
    assert LATENT.planes == (Plane(1, 576),)
