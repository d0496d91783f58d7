"""Launches typed by prototypes, the table of fusions, and captured segments."""

import re

import numpy as np
import pytest

from common.errors import BimetalError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import cubin, fuse, mixture, rows  # noqa: E402
from cuda_backend.attention import ATTENTION  # noqa: E402
from cuda_backend.card import available  # noqa: E402
from cuda_backend.exchange import SUM  # noqa: E402
from cuda_backend.launch import Stream, converter, kernel  # noqa: E402
from cuda_backend.prototypes import IN, OUT, prototypes, type_of  # noqa: E402
from cuda_backend.segments import HostCall, Program, Shape, run_step  # noqa: E402
from cuda_backend.sources import KERNELS, source  # noqa: E402

pytestmark = pytest.mark.gpu


def test_every_prototype_has_types():
    count = 0
    for path in sorted(KERNELS.glob("*.cu")):
        found = prototypes(path.read_text())
        assert len(found) == path.read_text().count('extern "C" __global__'), path.name
        for parameters in found.values():
            assert all(type_of(parameter) for parameter in parameters)
            count += 1
    assert count > 40


def test_numbers_take_the_type_of_their_parameter():
    assert converter(np.dtype(np.uint64))(1 << 63).dtype == np.uint64
    assert converter(np.dtype(np.int32))(True).dtype == np.int32
    assert converter(np.dtype(np.float32))(0.1) == np.float32(0.1)
    record = np.zeros((), IN)
    assert converter(IN)(record) is record


@pytest.mark.parametrize(
    ("dtype", "value", "error"),
    [
        (np.dtype(np.int32), 1.5, TypeError),
        (np.dtype(np.int32), 1 << 31, OverflowError),
        (np.dtype(np.uint64), -1, OverflowError),
        (OUT, np.zeros((), IN), TypeError),
    ],
)
def test_refused_arguments(dtype, value, error):
    with pytest.raises(error):
        converter(dtype)(value)


def test_modules_compiled_for_one_capability_are_kept(tmp_path, monkeypatch):
    """A second process loads the first one's file; a damaged file is replaced; without a folder nothing is kept."""
    code, compiled = source("random"), []
    real = cubin.compiled
    monkeypatch.setattr(cubin, "compiled", lambda *a: compiled.append(a) or real(*a))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kernels"))
    target = f"sm_{available().capability}"
    for _ in range(2):
        assert cubin.module(code, (), target).get_function("fill").name == "fill"
        assert len(compiled) == 1
    (kept,) = (tmp_path / "kernels").iterdir()
    damaged = tmp_path / "others" / kept.name
    damaged.parent.mkdir()
    damaged.write_bytes(b"nothing")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(damaged.parent))
    assert cubin.module(code, (), target).get_function("fill")
    assert len(compiled) == 2
    assert damaged.read_bytes() == kept.read_bytes()
    (tmp_path / "a file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "a file"))
    assert cubin.module(code, (), target).get_function("fill")
    assert len(compiled) == 3


def test_a_missing_argument_is_refused():
    stream = Stream()
    with pytest.raises(TypeError, match="kernel fill takes 3 arguments, got 2"):
        kernel("random", "fill")((1,), (32,), (0, 4), stream=stream)
    assert stream.launches == 0


def test_fusions_name_ops_and_kernels():
    names = {op.name for op in (rows.NORM, rows.HEADS, mixture.EXPERTS, ATTENTION, SUM, *rows.POINTWISE.values())}
    keys = [(row.consumer, row.producer) for row in fuse.FUSIONS]
    assert len(set(keys)) == len(keys)
    for row in fuse.FUSIONS:
        assert row.producer in names
        for file, name in re.findall(r"(\w+\.cu) (\w+)", row.kernel):
            assert name in prototypes((KERNELS / file).read_text()), row.kernel


def test_a_step_is_captured_after_one_that_ran_to_its_end():
    """A first step may lack memory for what it computes: a graph would then be the one that takes it."""
    table, did = {}, []

    def call():
        did.append("called")
        if len(did) < 3:
            raise BimetalError("no memory is free")

    def captured():
        did.append("captured")
        return Program([], None)

    for _ in range(2):
        with pytest.raises(BimetalError):
            run_step(table, Shape(8), call, captured)
    for _ in range(2):
        run_step(table, Shape(8), call, captured)
    assert did == [*["called"] * 3, "captured"]


def test_segments_are_played_in_order():
    """The first step is called, the second captured and played, later ones played; prefill is always called."""
    played, table = [], {}

    def step(T):
        def captured():
            played.append("capture")
            return Program([HostCall(lambda: played.append(1)), HostCall(lambda: played.append(2))], "captured")

        return run_step(table, Shape(T), lambda: "called", captured)

    assert [step(8) for _ in range(3)] == ["called", "captured", "captured"]
    assert played == ["capture", 1, 2, 1, 2]
    assert [step(137) for _ in range(3)] == ["called"] * 3
