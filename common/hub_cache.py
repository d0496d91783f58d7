"""The models in the Hugging Face cache: their names, files and removal.

The cache is huggingface_hub's own, as in common/hub.py: models that other tools downloaded are listed and removed too.
"""

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import BimetalError
from common.files import is_held
from common.hub import NAME
from common.hub_answers import check_endpoint
from common.hub_files import PART, is_aside, quant_label

PREFIX = "models--"  # of a repository's folder in the cache


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache.

    name    what --model takes: "owner/repo", "owner/repo:Q4_K_M" or "owner/repo/file.gguf"
    repo    its repository, "owner/repo"
    files   entries of the repository's snapshots, of all commits; of a broken folder, whatever files it has
    blobs   the files on the disk that hold their bytes
    size    bytes on the disk
    used    when one of the blobs was last read or written, as the file system records it: seconds since 1970
    broken  whether a download has left no whole commit
    """

    name: str
    repo: str
    files: tuple[Path, ...]
    blobs: tuple[Path, ...]
    size: int
    used: float
    broken: bool = False


def cache_folder() -> Path:
    check_endpoint()
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_models() -> list[CachedModel]:
    """List the models of the cache, by name. A repository's GGUF models count separately; its other files are one."""
    folder = cache_folder()
    if not folder.is_dir():
        return []
    known = {repo.repo_path: repo for repo in _scan(folder).repos}
    models: list[CachedModel] = []
    for path in sorted(folder.glob(f"{PREFIX}*--*")):
        name = path.name.removeprefix(PREFIX).replace("--", "/")
        if path in known:
            models += _of_repo(name, path, known[path])
        elif files := [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]:
            models.append(_model(name, name, files, files, broken=True))
    return models


def _scan(folder: Path) -> Any:
    """Scan the cache by huggingface_hub; folders that it calls corrupted are left out without a log line."""
    from huggingface_hub import scan_cache_dir

    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return scan_cache_dir(folder)
    finally:
        logger.setLevel(before)


def _of_repo(name: str, path: Path, repo: Any) -> list[CachedModel]:
    ggufs: dict[str, list[Any]] = {}  # by path in the repository, without the number of a part
    others: list[Any] = []
    for revision in repo.revisions:
        for file in revision.files:
            inside = file.file_path.relative_to(revision.snapshot_path).as_posix()
            is_model = inside.endswith(".gguf") and not is_aside(inside)
            (ggufs.setdefault(PART.sub("", inside), []) if is_model else others).append(file)
    labels = [quant_label(model) for model in ggufs]
    models = []
    for model, files in ggufs.items():
        label = quant_label(model)
        entries = sorted(file.file_path for file in files)
        inside = entries[0].relative_to(path / "snapshots").as_posix().partition("/")[2]
        called = f"{name}:{label}" if labels.count(label) == 1 else f"{name}/{inside}"
        models.append(_model(called, name, entries, [file.blob_path for file in files]))
    unfinished = list((path / "blobs").glob("*.incomplete"))
    if others or unfinished:
        blobs = [*(file.blob_path for file in others), *unfinished]
        models.append(_model(name, name, [*(file.file_path for file in others), *unfinished], blobs))
    return sorted(models, key=lambda model: model.name)


def _model(name: str, repo: str, files: Iterable[Path], blobs: Iterable[Path], broken: bool = False) -> CachedModel:
    unique = sorted(set(blobs))
    stats = [blob.stat() for blob in unique]
    used = max(max(stat.st_atime, stat.st_mtime) for stat in stats)
    return CachedModel(name, repo, tuple(files), tuple(unique), sum(stat.st_size for stat in stats), used, broken)


def find_cached(name: str) -> list[CachedModel]:
    """Find the models of a name: "owner/repo" all of its repository, any other name one. Raises BimetalError."""
    match = NAME.fullmatch(name)
    if match is None:
        raise BimetalError(f"{name!r} is not the name of a cached model; bimetal list shows them")
    repo, models = match["repo"], cached_models()
    of_repo = [model for model in models if model.repo == repo]
    if match["file"]:
        found = [m for m in of_repo if any(file.as_posix().endswith("/" + match["file"]) for file in m.files)]
    elif match["quant"]:
        found = [model for model in of_repo if model.name.upper() == f"{repo}:{match['quant']}".upper()]
    else:
        found = of_repo
    if not found:
        held = f"; of {repo} it holds {', '.join(model.name for model in of_repo)}" if of_repo else ""
        raise BimetalError(f"{name} is not in the cache {cache_folder()}{held}")
    return found


def remove(models: list[CachedModel]) -> int:
    """Remove models of one repository from the cache; returns the bytes freed. Raises BimetalError or OSError.

    The repository's folder is removed with its last model. Blobs that other models share are kept.
    """
    folder = cache_folder()
    storage = folder / (PREFIX + models[0].repo.replace("/", "--"))
    locks = (folder / ".locks" / storage.name).glob("*.lock")
    if busy := next((path for path in locks if is_held(path)), None):
        raise BimetalError(f"{models[0].repo} is being downloaded (it holds the lock {busy}); end that first")
    names = {model.name for model in models}
    rest = [model for model in cached_models() if model.repo == models[0].repo and model.name not in names]
    for model in models:
        if any(is_held(blob) for blob in model.blobs):
            raise BimetalError(f"{model.name} is in use by a running program; end it first")
    shared = {blob for model in rest for blob in model.blobs}
    gone = {blob: blob.stat().st_size for model in models for blob in model.blobs if blob not in shared}
    if not rest:
        _remove_repository(folder, storage)
    else:
        for file in (file for model in models for file in model.files):
            file.unlink(missing_ok=True)
        for blob in gone:
            blob.unlink(missing_ok=True)
    return sum(gone.values())


def _remove_repository(folder: Path, storage: Path) -> None:
    """Remove a repository's folder, through huggingface_hub if it lists its commits, because they may share blobs."""
    info = _scan(folder)
    repos = [repo for repo in info.repos if repo.repo_path == storage]
    if commits := [revision.commit_hash for repo in repos for revision in repo.revisions]:
        # Of this repository alone: delete_revisions takes the first that has a commit, and renamed ones share commits.
        replace(info, repos=frozenset(repos)).delete_revisions(*commits).execute()
    if storage.exists():  # no whole commit, or an error that huggingface_hub has only logged
        shutil.rmtree(storage)
