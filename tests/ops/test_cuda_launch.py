"""Launches typed by prototypes, the table of fusions, and captured segments."""

import ctypes
import re

import numpy as np
import pytest

from common.errors import BimetalError

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cuda_backend import cubin, fuse, mixture, rows  # noqa: E402
from cuda_backend.attention import ATTENTION  # noqa: E402
from cuda_backend.card import available  # noqa: E402
from cuda_backend.exchange import SUM  # noqa: E402
from cuda_backend.launch import Stream, kernel  # noqa: E402
from cuda_backend.prototypes import ADDRESS, IN, OUT, Arguments, prototypes, type_of  # noqa: E402
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


def test_arguments_lie_in_memory_as_c_aligns_them():
    record = np.zeros((), IN)
    record["p"], record["inner"] = 1 << 40, 7
    types = [np.dtype(np.int32), ADDRESS, np.dtype(np.float32), IN, np.dtype(np.int32)]
    aligned = np.dtype([(str(i), each) for i, each in enumerate(types)], align=True)
    arguments = Arguments(types)
    first = arguments.pack((True, 1 << 63, 0.1, record, -3))
    two, where, one, size, end = (ctypes.c_size_t * 5).from_address(ctypes.addressof(first))
    assert (two, one, end) == (1, 2, 0)
    nbytes = ctypes.c_size_t.from_address(size).value
    given = np.frombuffer(ctypes.string_at(where, nbytes).ljust(aligned.itemsize, b"\0"), aligned)[0]
    assert given.tolist() == (1, 1 << 63, np.float32(0.1), record.tolist(), -3)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.dtype(np.int32), 1.5), (np.dtype(np.int32), 1 << 31), (ADDRESS, -1), (OUT, np.zeros((), IN)), (OUT, 3)],
)
def test_refused_arguments(dtype, value):
    with pytest.raises(TypeError):
        Arguments([dtype]).pack([value])


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
    with pytest.raises(TypeError, match=r"kernel fill\(.*\) was given 2 arguments"):
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
