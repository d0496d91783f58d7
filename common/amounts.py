"""Write and parse amounts: sizes of memory, and counts with their noun."""

import re

from common.errors import UsageError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def shown_size(nbytes: int) -> str:
    """Write "1.50 GB", "23.4 MB" below 10^9 bytes, and "5.0 KB" or "12 bytes" of what would be less than 0.1 MB."""
    if nbytes >= 10**9:
        return f"{nbytes / 1e9:.2f} GB"
    if nbytes >= 10**5:
        return f"{nbytes / 1e6:.1f} MB"
    return f"{nbytes / 1e3:.1f} KB" if nbytes >= 10**3 else counted(nbytes, "byte")


def counted(count: int, noun: str, several: str = "") -> str:
    """Write "1 token", "3 tokens"; `several` is the plural where it is not `noun` with an s."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


def parse_size(text: str) -> int:
    """Parse bytes: "24GB" (10^9 each), "24GiB" (2^30 each), "24G" (as GB), "24000MB", "24000000000"."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    if match is None or match[2].upper() not in UNITS:
        raise UsageError(f"{text!r} is not an amount of memory; write it like 24GB, 22.5GiB or 24000MB")
    size = float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= size < 2**63:
        raise UsageError(f"{text!r} is {size:.3g} bytes; an amount of memory is from 1 byte to 8 EiB")
    return round(size)
