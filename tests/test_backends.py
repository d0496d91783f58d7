"""Which backend is chosen, and how a GPU that cannot run is reported: tests/cuda_on_cpu stands in for CuPy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_chat import write

import generate
from common.checkpoint import open_checkpoint
from common.errors import BimetalError, UsageError
from common.reference import NumpyOps
from generate import backends
from generate.backends import Found, Placement, choose

TESTS = Path(__file__).parent


def on_machine(monkeypatch, **usable):
    for name in backends.FINDERS:
        found = Found(name, usable.get(name, False), "a reason", is_gpu=name == "cuda")
        monkeypatch.setitem(backends.FINDERS, name, lambda found=found: found)


def test_chosen_by_itself(monkeypatch):
    on_machine(monkeypatch, cuda=True, mlx=True, numpy=True)
    assert choose(None).name == "cuda"
    monkeypatch.setitem(backends.FINDERS, "mlx", lambda: Found("mlx", True, "a chip", is_gpu=True))
    assert choose(None).name == "cuda"
    monkeypatch.setitem(backends.FINDERS, "cuda", lambda: Found("cuda", False, "no card"))
    assert choose(None).name == "mlx"
    on_machine(monkeypatch, mlx=True, numpy=True)
    assert choose(None).name == "numpy"
    on_machine(monkeypatch, numpy=True)
    assert choose(None).name == "numpy"


def test_chosen_on_a_cpu(monkeypatch, tmp_path):
    """NumPy where float32 weights fit; MLX decodes at a fifth of its speed there."""
    checkpoint = open_checkpoint(write(tmp_path))
    on_machine(monkeypatch, mlx=True, numpy=True)
    assert choose(None, checkpoint).name == "numpy"
    monkeypatch.setattr(NumpyOps, "free_bytes", lambda self: (100_000, "a small machine"))
    assert choose(None, checkpoint).name == "mlx"
    checkpoint.config["model_type"] = "unknown"
    monkeypatch.undo()
    on_machine(monkeypatch, mlx=True, numpy=True)
    assert choose(None, checkpoint).name == "mlx"  # which may have mlx-lm's definition
    on_machine(monkeypatch, numpy=True)
    assert choose(None, checkpoint).name == "numpy"


def test_chosen_by_name(monkeypatch):
    on_machine(monkeypatch, cuda=True, numpy=True)
    assert choose("numpy").name == "numpy"
    with pytest.raises(BimetalError, match="backend mlx cannot run here: a reason"):
        choose("mlx")
    with pytest.raises(UsageError, match="backend 'metal' is unknown; supported: cuda, mlx, numpy"):
        choose("metal")


@pytest.mark.parametrize("apples", [True, False])
def test_what_mlx_says_of_its_gpu(apples, monkeypatch):
    """MLX's builds for other GPUs name the fields of a device differently."""
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    from mlx_backend import ops

    sizes = {"memory_size": 2**35, "max_recommended_working_set_size": 10**9}
    info = {"device_name": "a GPU"} | (sizes if apples else {"total_memory": 2**35, "free_memory": 10**9})
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: apples)
    assert backends.find_mlx().description.startswith("a GPU, 32 GiB, MLX ")
    assert ops.MlxOps().free_bytes()[0] == 10**9
    monkeypatch.setattr(ops, "COPIED", 2**16)
    readings = iter((0.0, 4.0, 10.0, 12.0, 20.0, 21.0, 30.0, 33.0, 40.0, 48.0))
    monkeypatch.setattr(ops.time, "perf_counter", lambda: next(readings))
    assert ops.MlxOps().copy_bandwidth() == 2 * 8 * 4 * 2**16  # 8 copies of float32, read and written, in 1 s at best


def test_a_thread_of_mlx_leaves_nothing_that_ends_the_process():
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    code = """
import mlx.core as mx
from generate.backends import leave_thread
from generate.owner_thread import OwnerThread
def job():
    x = mx.random.normal((64,))
    mx.eval(mx.compile(lambda x: x * mx.sigmoid(x))(x))
    mx.async_eval(x + 1)
owner = OwnerThread("a thread", leave_thread)
owner.submit(job).result()
owner.close()
"""
    environment = os.environ | {"PYTHONPATH": f"{TESTS.parent}"}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [run.wait() for run in runs] == [0] * 3  # without it, about every other one is aborted


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA backend looks for a GPU on Linux alone")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("", "True a CPU, compute capability 8.9"),
        ("runtime.getDeviceCount = lambda: 0", "False no NVIDIA GPU is visible; choose another backend"),
        (
            "runtime.getDeviceCount = lambda: fail(runtime.CUDARuntimeError('no driver'))",
            "install a driver for CUDA 13",
        ),
        ("runtime.driverGetVersion = lambda: 12020", "update the driver, or install cupy-cuda12x"),
        ("cupy.PROPERTIES.update(major=7, minor=5)", "True a CPU, compute capability 7.5"),
        (
            "cupy.PROPERTIES.update(major=7, minor=2)",
            "compute capability 7.2; the CUDA kernels need 7.5 (Turing) or newer",
        ),
        ("cupy.cuda.nvrtc.getVersion = lambda: fail(ImportError('libnvrtc.so.13'))", "pip install 'cupy-cuda13x[ctk]'"),
    ],
)
@pytest.mark.few(2)
def test_what_is_said_of_a_gpu(change, said):
    code = f"""
import cupy
from cupy import runtime
def fail(error): raise error
{change}
from generate.backends import find_cuda
found = find_cuda()
print(found.usable, found.description)
"""
    environment = os.environ | {"PYTHONPATH": f"{TESTS / 'cuda_on_cpu'}:{TESTS.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said in done.stdout
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA backend looks for a GPU on Linux alone")
def test_too_little_memory():
    code = """
import cupy
from cuda_backend.memory import Memory
def full(n): raise cupy.cuda.memory.OutOfMemoryError
cupy.cuda.alloc = full
Memory(5 * 10**9)
"""
    environment = os.environ | {"PYTHONPATH": f"{TESTS / 'cuda_on_cpu'}:{TESTS.parent}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "GPU 0 has 1.0 of 1.0 GB free and 5.0 GB more are needed; choose a smaller" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA backend looks for a GPU on Linux alone")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--devices 2", "GPU 2 does not exist; this machine has GPUs 0 to 1"),
        ("--devices 0,1 --draft demo --draft-device 5", "GPU 5 does not exist"),
        ("--devices 0,1 --split 1", "split has 1 proportions for 2 devices; give one each"),
        ("--devices 0,1 --split 1,0", "split is [1.0, 0.0]; it must be proportions above 0"),
        ("--devices 0,1 --split 1,-1", "split is [1.0, -1.0]; it must be proportions above 0"),
        ("--devices 0,x", "'x' is not a whole number of at least 0"),
        ("--split 1,1", "split needs devices: the GPUs that hold the model"),
        ("--devices 0 --draft-device 1", "draft_device is 1, and there is no draft; give one"),
        ("--devices 0,1 --backend numpy", "devices are NVIDIA GPUs, and the backend is numpy"),
        ("--tensor-parallel 2", "tensor_parallel 2 needs 2 processes, one per machine, or 2 devices, NVIDIA GPUs"),
    ],
)
@pytest.mark.few(3)
def test_devices_that_cannot_be(flags, said):
    command = [sys.executable, "-m", "generate", "--prompt", "x", *flags.split()]
    environment = os.environ | {"PYTHONPATH": f"{TESTS / 'cuda_on_cpu'}:{TESTS.parent}", "BIMETAL_GPUS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("placed", "refused"),
    [
        ({"devices": (0, 1, 2)}, "tensor_parallel is 2, and devices 0,1,2 are 3; give as many"),
        ({"devices": (0, 1), "split": (1, 1)}, "tensor_parallel a part of each; leave one out"),
        ({"devices": (0, 1), "draft": 1}, "draft_device is 1; with tensor_parallel a draft runs on all devices"),
    ],
)
def test_ranks_that_cannot_be(placed, refused):
    with pytest.raises(UsageError, match=refused):
        Placement(**placed, tensor_parallel=2)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"devices": 0}, r"devices is 0; it must be GPUs by number, such as \(0, 1\)"),
        ({"devices": "01"}, "devices is '01'; it must be GPUs by number"),
        ({"devices": (0, True)}, r"devices is \(0, True\); it must be GPUs by number"),
        ({"devices": (0, 1), "split": "1,3"}, r"split is '1,3'; it must be proportions above 0, such as \(1, 3\)"),
        (
            {"devices": (0, 1), "draft_device": "1", "draft": "demo"},
            "draft_device is '1'; it must be a whole number",
        ),
    ],
)
def test_devices_of_callers(how, said):
    """A single number was once read as no choice."""
    with pytest.raises(UsageError, match=said):
        generate.load("demo", **how)


@pytest.mark.skipif(sys.platform != "linux", reason="the CUDA backend looks for a GPU on Linux alone")
def test_several_gpus_are_listed_by_number():
    code = "from generate.backends import find_cuda; print(find_cuda().description)"
    environment = os.environ | {"PYTHONPATH": f"{TESTS / 'cuda_on_cpu'}:{TESTS.parent}", "BIMETAL_GPUS": "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "GPU 0: a CPU, compute capability 8.9; GPU 1: a CPU, compute capability 8.9\n"
