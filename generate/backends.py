"""Choose a backend, and load a model on it. No other module imports a backend."""

import gc
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from common.amounts import parse_size, shown_size
from common.checkpoint import Checkpoint
from common.errors import BimetalError, UsageError
from common.fit import Blueprint, predict_layers, predict_run, predict_weights
from common.hot_experts import HotExperts
from common.models import Model, OpenExperts, architecture, exceeds_float16, is_defined, load_model, rank_config
from common.ops import Ops
from generate.machines import own_launch, rank
from generate.prefixes import digest, sources


@dataclass(frozen=True)
class Found:
    """One backend on this machine: whether it can run, on which device, or what is missing."""

    name: str
    usable: bool
    description: str
    is_gpu: bool = False


@dataclass(frozen=True)
class Placement:
    """GPUs that run a model.

    devices  numbers of the GPUs, in the order of the layers; empty: the first GPU
    split    proportions of the model's bytes, one per device; empty: those of free memory
    draft    the GPU of a draft; None: the last of `devices`
    memory   limit in bytes: of this process on each GPU, on other backends of the model; None: free memory
    tokens   tokens of the context that must fit into `memory` together with the weights; None: up to CACHED
    tensor_parallel  number of ranks that divide every layer, on `devices` or on a group of machines; None: the model is
             divided by layers
    alike    options that must be equal in all processes of a group, by what they are about
    """

    devices: Sequence[int] = ()
    split: Sequence[float] = ()
    draft: int | None = None
    memory: int | None = None
    tokens: int | None = None
    tensor_parallel: int | None = None
    alike: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.devices and (self.split or self.draft is not None):
            raise UsageError(f"{'split' if self.split else 'draft_device'} needs devices: the GPUs that hold the model")
        if self.split and len(self.split) != len(self.devices):
            raise UsageError(f"split has {len(self.split)} proportions for {len(self.devices)} devices; give one each")
        if any(not 0 < part < float("inf") for part in self.split):
            raise UsageError(f"split is {','.join(f'{p:g}' for p in self.split)}; proportions must be above 0")
        if self.devices and self.tensor_parallel is not None:
            self._check_ranks(self.tensor_parallel)

    def _check_ranks(self, count: int) -> None:
        """Refuse options that exclude tensor parallelism on GPUs."""
        if len(self.devices) != count:
            listed = ",".join(map(str, self.devices))
            raise UsageError(f"tensor_parallel is {count}, and devices {listed} are {len(self.devices)}; give as many")
        if self.split:
            raise UsageError("split gives each GPU layers of its own, tensor_parallel a part of each; leave one out")
        if self.draft is not None:
            raise UsageError(f"draft_device is {self.draft}; with tensor_parallel a draft runs on all devices")

    def __str__(self) -> str:
        """Describe the placement for a log: "GPUs 0,1 split 1,3, draft on 1"; "" for the default."""
        words = [f"GPUs {','.join(map(str, self.devices))}"] if self.devices else []
        words += [" sharing every layer"] if self.devices and self.tensor_parallel is not None else []
        words += [f" split {','.join(f'{part:g}' for part in self.split)}"] if self.split else []
        words += [f", draft on {self.draft}"] if self.draft is not None else []
        words += [f"{', ' if words else ''}at most {self.memory / 1e9:g} GB"] if self.memory is not None else []
        return "".join(words)


ONE_GPU = Placement()


def placement_of(args: Any) -> Placement:
    """Return the placement that parsed flags, or the options of a bench, ask for."""
    draft_device = getattr(args, "draft_device", None)
    check_draft(draft_device, getattr(args, "draft", None))
    memory = getattr(args, "memory", None)
    where = args.devices or (), args.split or (), draft_device, memory and parse_size(memory)
    return Placement(*where, tensor_parallel=args.tensor_parallel)


def check_draft(device: int | None, draft: str | None) -> None:
    """Refuse a GPU for a draft if no draft is given."""
    if device is not None and draft is None:
        raise UsageError(f"draft_device is {device}, and there is no draft; give one")


def find_cuda() -> Found:
    if platform.system() != "Linux":
        return Found("cuda", False, "an NVIDIA GPU needs Linux")
    if find_spec("cupy") is None:
        return Found("cuda", False, "CuPy is not installed: pip install 'bimetal[cuda12]'")
    try:
        return Found("cuda", True, backend_package("cuda").find_card(), is_gpu=True)
    except BimetalError as error:
        return Found("cuda", False, str(error))


def find_mlx() -> Found:
    if find_spec("mlx") is None:
        return Found("mlx", False, "MLX is not installed: pip install 'bimetal[mlx]'")
    try:
        import mlx.core as mx
    except ImportError as error:
        return Found("mlx", False, f"MLX is installed but does not load: {error}")
    if mx.default_device().type == mx.DeviceType.gpu:
        info = mx.device_info()
        gib = int(info["memory_size" if mx.metal.is_available() else "total_memory"]) / 2**30
        what = f"{info.get('device_name', 'GPU')}, {gib:.0f} GiB, MLX {version('mlx')}"
        return Found("mlx", True, what, is_gpu=True)
    return Found("mlx", True, f"CPU ({platform.machine()}), MLX {version('mlx')}")


def find_numpy() -> Found:
    import numpy

    return Found("numpy", True, f"CPU ({platform.machine()}), NumPy {numpy.__version__}, weights in float32")


FINDERS: dict[str, Callable[[], Found]] = {"cuda": find_cuda, "mlx": find_mlx, "numpy": find_numpy}
NAMES = tuple(FINDERS)
CHOICE = (
    "a GPU comes first; on a CPU numpy, whose products use all cores, where a model's float32 weights and "
    "a cache of {tokens} tokens fit into memory, else mlx, which holds quantized weights"
)
CACHED = 4096  # tokens beside which weights must fit


def usable() -> list[Found]:
    """Return the backends that this machine can run."""
    return [found for find in FINDERS.values() if (found := find()).usable]


def choose(name: str | None, checkpoint: Checkpoint | None = None) -> Found:
    """Return the backend `name`; None: as CHOICE describes, by whether `checkpoint`, if given, fits into memory."""
    if name is not None and name not in FINDERS:
        raise UsageError(f"backend {name!r} is unknown; supported: {', '.join(NAMES)}")
    if name is None:
        here = {found.name: found for found in usable()}
        gpu = next((found for found in here.values() if found.is_gpu), None)
        if gpu is not None or "mlx" not in here:
            return gpu or here["numpy"]
        return here["numpy" if checkpoint is None or _fits_numpy(checkpoint) else "mlx"]
    found = FINDERS[name]()
    if not found.usable:
        raise BimetalError(f"backend {name} cannot run here: {found.description}")
    return found


def _fits_numpy(checkpoint: Checkpoint) -> bool:
    """Test whether float32 weights and a cache of CACHED tokens fit into free memory."""
    from common.reference import NumpyOps

    if not is_defined(checkpoint):
        return False
    ops, definition = NumpyOps(), architecture(checkpoint)[1]
    config = definition.read_config(checkpoint)
    layout, spec = definition.layout(config, checkpoint), definition.state_spec(config)
    tokens = min(CACHED, config.context)
    run = predict_run(ops, Blueprint(config, layout, spec), tokens, ops.prefill_rows)
    try:
        weights = predict_weights(checkpoint, layout, ops)
    except BimetalError:  # damaged on every backend: loading reports it
        return True
    return weights + sum(run) <= ops.free_bytes()[0]


def open_backend(
    name: str | None,
    checkpoint: Checkpoint,
    placement: Placement = ONE_GPU,
    random: bool = False,
    hot: HotExperts | None = None,
) -> Ops:
    """Return the ops of the chosen backend, in the precision of `checkpoint`; call it in the thread that will use them.

    random  on CUDA, ops that make quantized matrices at random
    hot     on one CUDA GPU, the memory for hot experts; None: all experts are in its memory
    """
    if (launch := own_launch(placement)) is not None:
        package, sizes = backend_package(choose(name or "cuda").name), partial(_layer_bytes, checkpoint)
        return package.open_process(launch, sizes, _facts(checkpoint, placement, "cuda"), placement.memory)
    shared = rank() is not None
    chosen = choose("mlx" if shared else name, checkpoint).name
    if shared:
        needs = partial(_needs, checkpoint, placement)
        facts = _facts(checkpoint, placement, chosen)
        return backend_package(chosen).open_shared(
            checkpoint, exceeds_float16(checkpoint), needs, facts, placement.tensor_parallel is not None
        )
    if placement.memory is not None and chosen == "cuda":
        backend_package(chosen).limit_memory(placement.memory, placement.devices)
    if placement.devices:
        if chosen != "cuda":
            raise UsageError(f"devices are NVIDIA GPUs, and the backend is {chosen}; leave them out, or choose cuda")
        sizes = partial(_layer_bytes, checkpoint)
        if placement.tensor_parallel is not None:
            return backend_package(chosen).open_tensor_parallel(placement.devices, sizes, random)
        where = placement.devices, placement.split, placement.draft
        return backend_package(chosen).open_devices(*where, sizes, random)
    if placement.tensor_parallel is not None:
        raise UsageError(
            f"tensor_parallel {placement.tensor_parallel} needs as many devices: the GPUs that share layers"
        )
    if random and chosen == "cuda":
        return backend_package(chosen).random_ops()
    if chosen == "numpy":
        from common.reference import NumpyOps

        return NumpyOps()
    if hot is not None:
        return backend_package(chosen).open_ops(checkpoint, exceeds_float16(checkpoint), hot)
    return backend_package(chosen).open_ops(checkpoint, exceeds_float16(checkpoint))


def _facts(checkpoint: Checkpoint, placement: Placement, backend: str) -> dict[str, object]:
    """Describe what must be equal in all processes of a group: Group.agree."""
    return {
        "the code of bimetal": sources(backend).hex()[:8],
        "the digest of the model": digest(checkpoint),
        "tensor_parallel": placement.tensor_parallel,
        "ctx": placement.tokens,
        **placement.alike,
    }


def _needs(checkpoint: Checkpoint, placement: Placement, ops: Ops) -> tuple[list[int], int, int]:
    """Return (bytes by layer with its states, weights outside the layers with the first; hidden size; memory).

    With tensor parallelism, bytes of this rank's part.
    """
    definition = architecture(checkpoint)[1]
    config = rank_config(definition, checkpoint, ops.ranks)
    spec, layout = definition.state_spec(config), definition.layout(config, checkpoint)
    tokens = min(placement.tokens or CACHED, config.context)
    weights = predict_layers(checkpoint, layout, ops, out=0)
    states = [ops.held_state_bytes([layer], tokens, ops.prefill_rows) for layer in spec]
    memory = ops.free_bytes()[0] if placement.memory is None else placement.memory
    return [w + s for w, s in zip(weights, states, strict=True)], config.hidden, memory


def _check_memory(checkpoint: Checkpoint, placement: Placement, ops: Ops) -> None:
    """Refuse a model that needs more than the given memory."""
    if placement.memory is None:
        return
    if not is_defined(checkpoint):
        raise UsageError("memory: what a model run by mlx-lm needs is not known beforehand; leave it out")
    sizes, _, memory = _needs(checkpoint, placement, ops)
    if (need := sum(sizes)) > memory:
        raise BimetalError(
            f"the model needs {shown_size(need)} of memory, and memory is limited to {shown_size(memory)}: allow more, "
            "or choose a smaller quantization or context"
        )


def _layer_bytes(checkpoint: Checkpoint, ops: Ops) -> list[int]:
    definition = architecture(checkpoint)[1]
    return predict_layers(
        checkpoint, definition.layout(rank_config(definition, checkpoint, ops.ranks), checkpoint), ops
    )


def open_model(
    checkpoint: Checkpoint,
    backend: str | None,
    progress: bool = False,
    placement: Placement = ONE_GPU,
    experts: Callable[[Ops], OpenExperts] | HotExperts | None = None,
) -> Model:
    """Return the checkpoint on the chosen backend: by our definition, or on MLX by mlx-lm's where we have none.

    experts  returns the argument with which `load_model` opens experts that are read while the model runs; or the
             limit of a GPU's memory for experts
    """
    hot = experts if isinstance(experts, HotExperts) else None
    ops = open_backend(backend, checkpoint, placement, hot=hot)
    if ops.name != "cuda" and rank() is None:
        _check_memory(checkpoint, placement, ops)
    if checkpoint.adapters and not is_defined(checkpoint):
        raise BimetalError(f"{checkpoint.path}: adapters are supported for models that are not run by mlx-lm")
    if is_defined(checkpoint) or checkpoint.format != "safetensors" or experts is not None:
        return load_model(checkpoint, ops, progress, experts(ops) if callable(experts) else None)
    if ops.name == "mlx" and find_spec("mlx_lm"):
        print(f"{checkpoint.config.get('model_type')} is run by mlx-lm's own definition", file=sys.stderr)
        return backend_package("mlx").load_fallback(checkpoint, ops)
    try:
        return load_model(checkpoint, ops, progress)
    except BimetalError as error:
        more = "architectures that mlx-lm defines run on the backend mlx with pip install 'bimetal[mlx-lm]'"
        raise BimetalError(f"{error}; {more}") from None


def with_rope(model: Model, tokens: int) -> Model:
    """Return the model with the rope for sequences of at most `tokens` tokens; printed where it has two."""
    longest = getattr(getattr(model, "config", None), "original_context", 0)
    if not longest:
        return model
    kind = f"longer than {longest}" if tokens > longest else f"of at most {longest}"
    print(f"the rope is that of sequences {kind} tokens, because they may have {tokens}", file=sys.stderr)
    return replace(model, config=model.definition.for_context(model.config, tokens))


def leave_thread() -> None:
    """Free unused memory at the end of a thread that has used a backend.

    Streams of MLX that outlive the thread abort the process at its end.
    """
    gc.collect()  # ops and their arrays form reference cycles, and Python's collector does not see bytes of a GPU
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_cache()
        mx.clear_streams()
    if "cuda_backend.ops" in sys.modules:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def backend_package(name: str) -> ModuleType:
    """Return the package of backend `name`, "mlx" or "cuda": the one place that imports any."""
    if name == "cuda":
        import cuda_backend

        return cuda_backend
    import mlx_backend

    return mlx_backend
