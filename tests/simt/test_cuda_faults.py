"""CUDA kernels with one fault each, run through tests/cuda_on_cpu: the engine names each fault."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simt import build

pytestmark = pytest.mark.skipif(bool(build.MISSING), reason=build.MISSING)
TESTS = Path(__file__).parents[1]
HEAD = "#define FULL 0xffffffffu\n"
SHARED = "extern __shared__ float shared[]; const int i = threadIdx.x; float v = x[i];\n"
KERNELS = {  # body of a kernel of one block of 64 threads, and what the engine says: nothing if it is sound
    "a barrier": (SHARED + "shared[i] = v; __syncthreads(); out[i] = shared[63 - i];", None),
    "a warp's barrier": (SHARED + "shared[i] = v; __syncwarp(); out[i] = shared[i ^ 1];", None),
    "a return before a barrier": (
        "const int i = threadIdx.x; out[i] = x[i]; if (i > 31) return; __syncthreads();",
        None,
    ),
    "static shared memory": ("__shared__ float s[64]; s[threadIdx.x] = 1; out[threadIdx.x] = s[threadIdx.x];", None),
    "no barrier": (SHARED + "shared[i] = v; out[i] = shared[i / 2];", "race: .* reads byte .* of threadgroup memory"),
    "no barrier before the next round": (
        SHARED + "for (int r = 0; r < 2; r++) { shared[i] = v; __syncthreads(); out[i] = shared[63 - i]; v += 1; }",
        "race: ",
    ),
    "a warp's barrier for the block": (
        SHARED + "shared[i] = v; __syncwarp(); out[i] = shared[i < 32 ? i : 63 - i];",
        "race: .* reads byte .* of threadgroup memory",
    ),
    "no barrier in a warp": (SHARED + "shared[i] = v; __shfl_xor_sync(FULL, v, 1); out[i] = shared[i & ~1];", "race: "),
    "a shuffle by half of a warp": (
        SHARED + "if (i % 32 < 16) v = __shfl_xor_sync(FULL, v, 1); out[i] = v;",
        "divergence: .* wait in a warp instruction",
    ),
    "two warp instructions at once": (
        SHARED + "out[i] = i & 1 ? (float)__reduce_add_sync(FULL, i) : __shfl_xor_sync(FULL, v, 1);",
        "divergence: .* a warp instruction",
    ),
    "a shuffle beside a barrier": (
        SHARED + "if (i & 1) __syncthreads(); else v = __shfl_xor_sync(FULL, v, 1); out[i] = v;",
        "divergence: .* while .* waits in __syncthreads",
    ),
    "shared memory that nobody wrote": (
        SHARED + "if (i) shared[i] = v; __syncthreads(); out[i] = shared[63 - i];",
        r"uninitialised: thread \(63, 0, 0\) .* of threadgroup memory",
    ),
}
RUN = """
import json, sys
import cupy, numpy as np
from cuda_backend.launch import Kernel, Stream
code, count = json.load(sys.stdin)
module, stream, said = cupy.RawModule(code, ()), Stream(), []
for n in range(count):
    x, out = np.arange(64, dtype=np.float32), np.empty(64, np.float32)
    try:
        kernel = Kernel(module.get_function(f"kernel{n}"), ("const float* x", "float* out"))
        kernel((1,), (64,), (x.ctypes.data, out.ctypes.data), stream=stream)
        said.append("")
    except RuntimeError as error:
        said.append(str(error))
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    code = HEAD
    for n, (body, _) in enumerate(KERNELS.values()):
        code += f'extern "C" __global__ void kernel{n}(const float* x, float* out) {{\n{body}\n}}\n'
    environment = os.environ | {"PYTHONPATH": str(TESTS / "cuda_on_cpu"), "BIMETAL_RACES": "1"}
    told, command = json.dumps([code, len(KERNELS)]), [sys.executable, "-c", RUN]
    done = subprocess.run(command, env=environment, input=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(KERNELS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", KERNELS)
def test_cuda_kernel(name, said):
    expected = KERNELS[name][1]
    assert re.search(expected, said[name]) if expected else not said[name]
