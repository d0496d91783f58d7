"""CuPy's interface with nothing behind it: a launch or a copy returns at once, so that our own Python is what remains.

`install()` puts it in CuPy's place, before cuda_backend is imported. What the host copies from the device is zeros, and
after `count()` int32 numbers from 0 on.
"""

import ctypes
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

calls: Counter[str] = Counter()  # of CuPy so far, by name: the time that CuPy and the driver take for them comes on top
addresses = itertools.count(1 << 40, 1 << 40)
held: Counter[str] = Counter()  # bytes of device memory, by the function that holds them, and "all"
peaks: Counter[str] = Counter()  # the most that has been held since `peaks` was cleared


def counted(name: str, value: Any = None) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return value() if callable(value) else value

    return call


MOST = 1 << 17  # numbers that a copy to the host brings
numbers = (ctypes.c_int32 * MOST)()
TO_HOST = 2


def copy(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    calls["memcpyAsync"] += 1
    if kind == TO_HOST:
        ctypes.memmove(to, numbers, min(nbytes, 4 * MOST))


def count() -> None:
    """Have copies to the host bring 0, 1, 2, ..."""
    numbers[:] = list(range(MOST))


class Idle:
    """Counts the seconds from where the host has waited for the last graph to where it launches the next one."""

    def __init__(self) -> None:
        self.seconds, self.since, self.graphs = 0.0, 0.0, 0

    def launch(self, stream: Any) -> None:
        calls["graph.launch"] += 1
        self.graphs += 1
        if self.since:
            self.seconds += time.perf_counter() - self.since
            self.since = 0.0

    def wait(self, graphs: int) -> None:
        if graphs == self.graphs:
            self.since = time.perf_counter()


idle = Idle()


class Handle:
    """Memory, a stream, an event, a module or a kernel."""

    time = 0

    def __init__(self, *args: Any, **options: Any):
        self.ptr, self.kernel, self.name = next(addresses), self, "free"
        self.graphs: int | None = None  # launched before the event was recorded

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_function(self, name: str) -> "Handle":
        return self

    def record(self, stream: Any) -> None:
        calls["event.record"] += 1
        self.graphs = idle.graphs

    def synchronize(self) -> None:
        calls["synchronize"] += 1
        idle.wait(idle.graphs if self.graphs is None else self.graphs)

    def wait_event(self, event: Any) -> None:
        calls["wait_event"] += 1

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> SimpleNamespace:
        return SimpleNamespace(launch=idle.launch)


class Allocation:
    """Device memory, which counts while this object lives."""

    def __init__(self, nbytes: int):
        calls["alloc"] += 1
        self.ptr, self.nbytes = next(addresses), nbytes
        self.holders = (sys._getframe(3).f_code.co_name, "all")  # what called memory.Memory
        for holder in self.holders:
            held[holder] += nbytes
            peaks[holder] = max(peaks[holder], held[holder])

    def __del__(self) -> None:
        for holder in self.holders:
            held[holder] -= self.nbytes


PROPERTIES = {
    "name": b"no GPU",
    "major": 8,
    "minor": 0,
    "multiProcessorCount": 132,
    "sharedMemPerMultiprocessor": 228 << 10,
    "sharedMemPerBlockOptin": 227 << 10,
}


def install() -> None:
    """Put this in CuPy's place."""
    free = (140 << 30, 141 << 30)
    runtime = SimpleNamespace(
        CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
        memcpyHostToDevice=1,
        memcpyDeviceToHost=TO_HOST,
        memcpyDeviceToDevice=3,
        memGetInfo=lambda: free,
        getDeviceCount=lambda: 1,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        getDevice=lambda: 0,
        getDeviceProperties=lambda device: PROPERTIES,
        memcpyAsync=copy,
        memsetAsync=counted("memsetAsync"),
    )
    pool = SimpleNamespace(total_bytes=lambda: 0, free_all_blocks=lambda: None, get_limit=lambda: 0)
    cupy: Any = ModuleType("cupy")
    cupy.__spec__, cupy.cuda = ModuleSpec("cupy", None), ModuleType("cupy.cuda")
    cupy.RawModule, cupy.get_default_memory_pool = Handle, lambda: pool
    cupy.cuda.__dict__.update(
        runtime=runtime,
        alloc=Allocation,
        alloc_pinned_memory=bytearray,
        PinnedMemoryPointer=bytearray,
        PinnedMemoryPool=lambda: SimpleNamespace(malloc=bytearray),
        Event=counted("Event", Handle),
        Stream=Handle,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
        nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
        device=SimpleNamespace(get_cublas_handle=lambda: 0),
        cublas=SimpleNamespace(gemmEx=counted("gemm"), gemmStridedBatchedEx=counted("gemm")),
        driver=SimpleNamespace(launchKernel=counted("launch")),
    )
    cupy.cuda.Device = Handle
    sys.modules.update({"cupy": cupy, "cupy.cuda": cupy.cuda})
