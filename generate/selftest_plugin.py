"""A pytest plugin for generate/selftest.py: writes what is collected, begins, ends and fails to a pipe, in JSON."""

import json
import os
from typing import Any

PIPE = "BIMETAL_SELFTEST_PIPE"  # the variable that holds the pipe's file descriptor


def pytest_collection_finish(session: Any) -> None:
    _write(total=len(session.items))


def pytest_collectreport(report: Any) -> None:
    if not report.passed:
        _write(test=report.nodeid, outcome=report.outcome, why=_why(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(begins=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        _write(test=report.nodeid, outcome=report.outcome, why=_why(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(ends=nodeid)


def _why(report: Any) -> str:
    """Return the first lines of a failure and its place, or the reason of a skip."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ").partition("\n")[0]
    lines = [line.rstrip() for line in report.longreprtext.splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return "\n".join(line[:300] for line in [*(errors or lines)[:3], *lines[-1:]])


def _write(**event: Any) -> None:
    os.write(int(os.environ[PIPE]), (json.dumps(event) + "\n").encode())
