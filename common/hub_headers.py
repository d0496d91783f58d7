"""The headers of a repository's files, without their weights, in a folder that a checkpoint opens.

Readers map files, so the headers are written to files of the full size, whose rest is a hole. huggingface_hub's file
system reads ranges as well, but in blocks of a size chosen beforehand, and the files would still have to be written.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.errors import BimetalError
from common.gguf import read_gguf
from common.hub_answers import Listing, hub_refusal, short_reason
from common.hub_download import WORKERS

FIRST_CHECK = 1 << 16  # bytes of a file after which its header may be whole; doubled each time it is not


def fetch_headers(repo: str, listing: Listing, paths: Sequence[str], folder: Path, progress: bool = False) -> None:
    """Make `folder` look like the repository to `open_checkpoint`: headers are fetched, the rest of a file is a hole.

    Small files (config.json, an index of safetensors files) come whole. Raises BimetalError.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    chosen = [p for p in paths if p.endswith((".gguf", ".safetensors", "config.json", ".safetensors.index.json"))]

    def fetch(path: str) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fetch_header(repo, path, listing, target)
        except HfHubHTTPError as error:
            raise BimetalError(hub_refusal(error, repo)) from None
        except (HTTPError, OSError) as error:
            raise BimetalError(f"the headers of {repo} could not be fetched: {short_reason(error)}") from None

    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = pool.map(fetch, chosen)
        for _ in tqdm(jobs, "headers", len(chosen), leave=False, disable=None if progress else True):
            pass


def _fetch_header(repo: str, path: str, listing: Listing, target: Path) -> None:
    """Write the beginning of a file up to where its header is whole, then a hole up to the file's size."""
    from huggingface_hub import constants, get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    size = listing.sizes[path]
    url = hf_hub_url(repo, path, revision=listing.commit)
    headers = build_hf_headers() | {"Accept-Encoding": "identity"}
    have, check, complaint = 0, FIRST_CHECK, ""
    with (
        get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response,
        target.open("wb", buffering=0) as file,
    ):
        hf_raise_for_status(response)
        for chunk in response.iter_bytes():
            have += file.write(chunk)
            if have > size:
                raise BimetalError(f"{path} of {repo} has more than its {size} bytes")
            if check <= have < size:
                file.truncate(have)  # without the hole of the last check
                previous, complaint = complaint, _complaint(target)
                file.truncate(size)
                if _is_whole(target, have):
                    return
                if complaint and complaint == previous:  # one about a missing end names the size, which has grown
                    return  # whoever opens the file will get this error
                check *= 2
    if have < size:
        raise BimetalError(f"{path} of {repo} ends before its {size} bytes")


def _complaint(file: Path) -> str:
    """Describe what is wrong with a GGUF file of which only the beginning is present; "" for other files."""
    try:
        if file.suffix == ".gguf":
            read_gguf(file)
    except BimetalError as error:
        return str(error)
    return ""


def _is_whole(file: Path, have: int) -> bool:
    """Test whether the first `have` bytes of `file`, followed by a hole, hold its header."""
    if file.suffix == ".safetensors":
        with file.open("rb") as head:
            return have >= 8 + int.from_bytes(head.read(8), "little")
    try:
        tensors = read_gguf(file)[1] if file.suffix == ".gguf" else {}
    except BimetalError:
        return False
    # the zeros of the hole may pass for a last key or tensor: the header must end before the hole
    return bool(tensors) and min(_offset(tensor.data) for tensor in tensors.values()) <= have


def _offset(view: np.ndarray) -> int:
    """Return the offset of `view` in its mapped file."""
    whole = view
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    return view.ctypes.data - whole.ctypes.data
