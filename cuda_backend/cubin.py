"""Compile modules for one compute capability alone (sm_90a), which CuPy's compilation does not support."""

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

import cupy

from cuda_backend.sources import OPTIONS


def module(code: str, defines: tuple[str, ...], architecture: str) -> cupy.RawModule:
    """Load the module of `code`, compiled for `architecture`, "sm_90a", or found in CuPy's cache folder.

    Raises cupy.cuda.compiler.CompileException with NVRTC's log.
    """
    options = (f"-arch={architecture}", *OPTIONS, "-ftz=true", "-default-device", *(f"-D{d}" for d in defines))
    name = hashlib.sha256("\0".join((str(cupy.cuda.nvrtc.getVersion()), *options, code)).encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser()
    kept = folder / f"bimetal-{name}.cubin"
    with contextlib.suppress(Exception):  # absent or damaged: compile it below
        return _load(kept)
    binary = compiled(code, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = _written(folder, binary)
        os.replace(made, kept)
        return _load(kept)
    except OSError:  # the disk is full
        made = _written(None, binary)
        try:
            return _load(made)
        finally:
            made.unlink(missing_ok=True)


def _written(folder: Path | None, binary: bytes) -> Path:
    """Write a new file in `folder` (None: the folder of temporary files); raises OSError and then leaves no file."""
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".cubin", delete=False) as file:
        path = Path(file.name)
        try:
            file.write(binary)
            file.flush()
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return path


def _load(path: Path) -> cupy.RawModule:
    loaded = cupy.RawModule(path=str(path))
    loaded.compile()
    return loaded


def compiled(code: str, options: tuple[str, ...]) -> bytes:
    """Compile `code` to a cubin; raises CompileException with NVRTC's log."""
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(code, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise cupy.cuda.compiler.CompileException(log, code, "kernel.cu", options, "nvrtc") from error
    finally:
        nvrtc.destroyProgram(program)
