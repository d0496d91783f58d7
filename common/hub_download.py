"""Download the files of a repository that huggingface_hub's cache lacks, complete and checked.

Files are fetched by plain HTTP ranges into the cache, where huggingface_hub finds them. Its own download, since 1.18,
discards an interrupted file (huggingface_hub#4228), and uses a file's ETag unchecked as the name of the file to write.
"""

import errno
import hashlib
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from common.errors import BimetalError
from common.hub_answers import LONGEST_WAIT, RETRIED, WAITS, Listing, hub_refusal, retry_after, short_reason

WORKERS = 4  # files at a time
MAX_HTTP = 50_000_000_000  # bytes: the Hub serves no larger file over plain HTTP


def fetch(repo: str, storage: Path, listing: Listing, paths: list[str], progress: bool) -> None:
    """Download `paths` into the cache, complete and checked; after an error or Ctrl-C, partial files can be resumed."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.utils import WeakFileLock
    from tqdm.auto import tqdm

    unique = list({listing.hashes[path]: path for path in paths}.values())
    large, small = ([path for path in unique if listing.is_large(path) == kind] for kind in (True, False))
    total = sum(listing.sizes[path] for path in large)
    hidden = None if large and progress else True  # None: shown on a terminal and in a notebook
    lock = storage.parent / ".locks" / storage.name / "bimetal.lock"  # two runs must not append to one partial
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            _drop_damaged(storage, listing, paths)
            _require_space(storage, listing, paths)
            with tqdm(disable=True) as bar:
                _fetch_blobs(repo, storage, listing, small, bar)
            with tqdm(total=total, desc=repo, unit="B", unit_scale=True, disable=hidden) as bar:
                _fetch_blobs(repo, storage, listing, large, bar)
            for path in paths:
                _enter(storage, listing, path)
    except HfHubHTTPError as error:
        raise BimetalError(hub_refusal(error, repo)) from None
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BimetalError(f"the disk of {storage} is full; make room, or set HF_HOME to a larger disk") from None
        if isinstance(error, OSError) and error.filename:
            raise BimetalError(f"cannot write to the cache: {short_reason(error)}") from None
        raise BimetalError(
            f"the download of {repo} from {constants.ENDPOINT} broke off ({short_reason(error)}); "
            "run again to continue it"
        ) from None
    for path in paths:
        arrived = disk_size(storage / "snapshots" / listing.commit / path)
        if arrived != listing.sizes[path]:
            raise BimetalError(f"{path} of {repo} has {arrived} bytes on disk, but {listing.sizes[path]} on the hub")


def _drop_damaged(storage: Path, listing: Listing, paths: list[str]) -> None:
    """Remove files of another size than on the Hub from the cache; the beginning of a large file is kept to resume."""
    for path in paths:
        file, blob = storage / "snapshots" / listing.commit / path, storage / "blobs" / listing.hashes[path]
        partial = _partial(blob)
        if blob.is_file() and disk_size(blob) != listing.sizes[path]:
            if disk_size(partial) < disk_size(blob) < listing.sizes[path]:
                blob.replace(partial)
            else:
                blob.unlink()
        if not file.exists() or disk_size(file) != listing.sizes[path]:
            file.unlink(missing_ok=True)


def _require_space(storage: Path, listing: Listing, paths: list[str]) -> None:
    blobs = [storage / "blobs" / listing.hashes[path] for path in paths]
    there = sum(disk_size(blob) or disk_size(_partial(blob)) for blob in blobs)
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
    """Download one file to the cache's blob of its hash; nothing with another hash gets that name."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    size, blob = listing.sizes[path], storage / "blobs" / listing.hashes[path]
    url, partial = hf_hub_url(repo, path, revision=listing.commit), _partial(blob)
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
        begun = hashlib.sha256() if listing.is_large(path) else hashlib.sha1(b"blob %d\0" % size)  # the latter is git's
        digest = hashlib.file_digest(file, lambda: begun).hexdigest()
    if digest != blob.name:
        partial.unlink()
        raise BimetalError(f"{path} of {repo} arrived damaged: its hash is {digest}, not {blob.name}; run again")
    partial.replace(blob)


def _enter(storage: Path, listing: Listing, path: str) -> None:
    """Make the entry of a commit's folder for a file: a link to its blob, or on a disk without links its bytes."""
    entry, blob = storage / "snapshots" / listing.commit / path, storage / "blobs" / listing.hashes[path]
    if not blob.exists():  # it has become an entry before
        return
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}.tmp")
    try:
        temporary.symlink_to(os.path.relpath(blob, entry.parent))
        temporary.replace(entry)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        if listing.is_large(path):
            blob.replace(entry)
        else:
            shutil.copyfile(blob, entry)


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


def _partial(blob: Path) -> Path:
    # Not `<hash>.incomplete`, into which older huggingface_hub versions write sparse files.
    return blob.with_name(f"{blob.name}.bimetal.incomplete")


def disk_size(path: Path) -> int:
    """Return the bytes of a file; 0 if it is missing."""
    return path.stat().st_size if path.exists() else 0
