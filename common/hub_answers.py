"""Checked answers of a hub, and the sentences for its refusals.

Every value that becomes a path, a size or a wait is checked here.
"""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from common.errors import BimetalError

RETRIED = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which a request is repeated
WAITS = (1, 2, 4, 8)  # seconds before each new attempt, or longer where the server says Retry-After
LONGEST_WAIT = 60  # seconds that a Retry-After may ask for; a longer one ends the attempts
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_HASH = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Listing:
    """Content of a repository, or of its cached copy, at one commit.

    sizes   bytes by path
    hashes  by path: a large file's SHA-256, any other file's hash in git; none of a cached copy
    """

    commit: str
    sizes: dict[str, int]
    hashes: dict[str, str]

    def is_large(self, path: str) -> bool:
        """Test whether a file is stored outside of git."""
        return bool(SHA256.fullmatch(self.hashes[path]))


def checked_listing(info: Any, answers: str) -> Listing:
    """Return the listing in a ModelInfo, whose commit, hashes and file names become paths in the cache.

    Raises BimetalError for a value that is not of the form that the Hub documents; `answers` begins the sentence.
    """
    if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha):
        raise BimetalError(f"{answers} the commit {info.sha!r}, which is not a hexadecimal hash")
    sizes: dict[str, int] = {}
    hashes: dict[str, str] = {}
    for file in info.siblings or []:
        name, large = file.rfilename, file.lfs
        if not isinstance(name, str) or not is_relative(name):
            raise BimetalError(f"{answers} the file name {name!r}, which is not a path inside the repository")
        if type(file.size) is not int or file.size < 0:
            raise BimetalError(f"{answers} the size {file.size!r} of {name}, which is not a number of bytes")
        what, found, form = ("hash", file.blob_id, GIT_HASH) if large is None else ("SHA-256", large.sha256, SHA256)
        if not isinstance(found, str) or not form.fullmatch(found):
            digits = 40 if form is GIT_HASH else 64
            raise BimetalError(f"{answers} the {what} {found!r} of {name}, which has not {digits} hexadecimal digits")
        hashes[name] = found
        sizes[name] = file.size
    return Listing(info.sha, sizes, hashes)


def is_relative(path: str) -> bool:
    """Test whether the path stays below the folder that it is joined to, on every system."""
    parts = path.split("/")
    return path.isprintable() and not set(path) & set("\\:") and not set(parts) & {"", ".", ".."}


def check_endpoint() -> None:
    """Refuse a HF_ENDPOINT that is not the address of a web server, before huggingface_hub reads it when imported."""
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise BimetalError(f"HF_ENDPOINT is {endpoint!r}; it must be an address such as https://huggingface.co")


def seconds_to_wait(response: Any, wait: int | None) -> float | None:
    """Return the seconds to wait before a request is sent again after an error answer; None: it is not sent again.

    wait  seconds to wait unless the answer has a Retry-After; None after the last attempt
    """
    if wait is None or response.status_code not in RETRIED:
        return None
    requested = retry_after(response)
    return None if requested > LONGEST_WAIT else max(wait, requested)


def retry_after(response: Any) -> float:
    """Return the seconds of an answer's Retry-After header, which states a number or a date; 0 without a usable one."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


# -- messages ----------------------------------------------------------------------------------------------------------


def hub_refusal(error: Any, repo: str) -> str:
    """Return the sentence for an HTTP error answer (an HfHubHTTPError)."""
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
    """Return the first line of an exception, or its class where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
