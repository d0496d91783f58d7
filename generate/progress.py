"""Progress bar of a long prompt, for callers of the Python API."""

from contextlib import suppress

from tqdm.auto import tqdm

from common.scores import PREFILL_ROWS


class PrefillBar:
    """A bar over the tokens of a prompt of several steps: tqdm's widget in a notebook, else on a terminal's stderr."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def update(self, read: int, total: int) -> None:
        """Show that `read` of `total` tokens have been read."""
        if total <= PREFILL_ROWS:
            return
        with suppress(OSError):  # the terminal is closed, and the reply continues
            if self._bar is None:
                self._bar = tqdm(total=total, desc="prefill", unit="token", leave=False, disable=None)
            self._bar.update(read - self._bar.n)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
