"""The disk tier: restarts, damage, foreign and hostile files, budgets, and processes killed at any moment."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tiny
from prefix_states import Fake, Rows, clear, reading_of, restored, text, texts

from common import prefix_file
from common.errors import BimetalError
from common.prefix_cache import PrefixCache
from common.prefix_disk import PrefixDisk
from common.prefix_file import read, read_header
from common.reading import Reading
from common.reference import NumpyOps
from common.step import Step

MODEL, OTHER = "a" * 32, "b" * 32


class Opened:
    """A cache with a disk tier, as one process after another opens them."""

    def __init__(self, folder, budget=10**8, fingerprint=MODEL, memory=10**8):
        self.lines = []
        self.disk = PrefixDisk(folder, budget, fingerprint, self.lines.append)
        self.cache = PrefixCache(fingerprint.encode(), memory, self.disk)

    def offer(self, points, tokens, **marks):
        self.cache.offer(tokens, Fake(points, tokens, reading_of(tokens, **marks)))
        self.disk.flush()

    def found(self, points, tokens, **marks):
        return restored(self.cache, points, tokens, **marks).length

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.disk.close()


def files(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


@pytest.fixture(params=[True, False], ids=["points", "rows"])
def points(request):
    return request.param


def test_a_restart(tmp_path, points):
    tokens = text(900)
    cuts = {"turn0": 100, "turn1": 700}
    with Opened(tmp_path) as first:
        for n in (100, 700):
            first.offer(points, tokens[:n], turn0=100)
    with Opened(tmp_path) as second:
        assert second.found(points, tokens, **cuts) == 700
        assert second.found(points, tokens[:500], **cuts) == 100
        assert second.found(points, text(900, 1)) == 0
        assert second.lines == []
    with Opened(tmp_path, fingerprint=OTHER) as other:
        assert other.found(points, tokens, **cuts) == 0


@pytest.mark.parametrize(
    ("kept", "prompt", "length"),
    [
        (900, text(900), 512),  # 512, then 388 in one step
        (900, [*text(900)[:700], *text(200, 1)], 512),
        (900, text(600), 512),
        (900, text(512), 0),
        (600, text(600), 599),  # 512, then 88 in a short step, which may be cut anywhere
        (600, text(540), 539),
        (600, [*text(600)[:580], *text(40, 1)], 580),
        (600, [*text(600)[:580], *text(400, 1)], 512),
        (600, text(640), 600),
        (600, [*text(500), *text(100, 1)], 0),
    ],
)
def test_a_restart_continues_where_two_texts_part(tmp_path, points, kept, prompt, length):
    """A state without a point serves the prompts that share its beginning, up to where their steps are the same."""
    with Opened(tmp_path) as first:
        first.offer(points, text(900)[:kept])
    with Opened(tmp_path) as second:
        found = restored(second.cache, points, prompt)
        length = length if not points or length == kept else 0
        assert (found.length, found.matched) == (length, length)
        second.offer(points, prompt)
        assert second.lines == []
    with Opened(tmp_path) as third:
        assert third.found(points, [*prompt, 5], turn=len(prompt)) == len(prompt)


@pytest.mark.parametrize(
    ("name", "whole", "length"), [("qwen3", 600, 560), ("glm", 600, 560), ("qwen35", 600, 0), ("mistral", 600, 0)]
)
def test_models_continue_where_two_texts_part(name, whole, length, tmp_path):
    """Those with a recurrent state only where a whole state ends; the logits are those of reading everything."""
    model = tiny.load(name, NumpyOps())
    tokens, other = (text(700)[:560] + text(n, n) for n in (40, 30))

    def read_on(state, tokens, reading):
        while state.length < len(tokens):
            step = Step.chain(np.array(tokens[state.length : reading.next_cut(state.length)]), state.length)
            logits = model.forward(state, step)
            state.commit(range(len(step)))
        return logits[-1]

    with Opened(tmp_path) as first:
        state = model.new_state(1000)
        read_on(state, tokens, reading_of(tokens))
        first.cache.offer(tokens, state)
    for prompt, found in (([*tokens, 5, 6], whole), (other, length)):
        reading, fresh, state = reading_of(prompt), model.new_state(1000), model.new_state(1000)
        with Opened(tmp_path) as second:
            assert second.cache.restore(prompt, state, reading) == (found, found, 0)
        assert np.array_equal(read_on(state, prompt, reading), read_on(fresh, prompt, reading))


def counted_reads(monkeypatch):
    """The names of the files whose rows are read, and the tokens up to which they are."""
    reads = []

    def counted(header, length, has_end):
        reads.append((header.path.name, length))
        return read(header, length, has_end)

    monkeypatch.setattr("common.prefix_disk.read", counted)
    return reads


def test_only_the_files_that_hold_the_beginning_are_read(tmp_path, monkeypatch):
    """Of a conversation's files, not those of its later turns."""
    tokens, names = text(2000), []
    with Opened(tmp_path) as first:
        for n in (550, 650, 1000):
            first.offer(False, tokens[:n], turn0=550, turn1=650)
            names += [path.name for path in files(tmp_path) if path.name not in names]
    reads = counted_reads(monkeypatch)
    with Opened(tmp_path) as second:
        prompt = [*tokens[:600], *text(20, 1)]
        assert second.found(False, prompt, turn0=550) == 600
    assert reads == [(names[1], 600), (names[0], 550)]


def test_a_cut_state_is_read_if_it_saves_a_page(tmp_path, monkeypatch):
    """Memory has 512 tokens of these 599, and reading the others again takes less than reading the file."""
    reads = counted_reads(monkeypatch)
    with Opened(tmp_path) as opened:
        opened.offer(False, text(600))
        assert opened.found(False, text(600)) == 512
        assert reads == []
        clear(opened.cache)
        assert opened.found(False, text(600)) == 599
        assert len(reads) == 1
        clear(opened.cache)
        assert opened.found(False, text(200)) == 0
    with Opened(tmp_path / "short") as opened:
        opened.offer(False, text(130))
        clear(opened.cache)
        assert opened.found(False, text(130)) == 0


@pytest.mark.parametrize(("token", "whole"), [(100, False), (511, False), (520, True)])
def test_damage_after_the_beginning_is_not_read(tmp_path, token, whole):
    """A file of 900 tokens serves its first 512 while their rows are what was written; a damaged one is deleted."""
    with Opened(tmp_path) as first:
        first.offer(False, text(900))
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) - 16 * (900 - token)] ^= 1
    path.write_bytes(data)
    with Opened(tmp_path) as opened:
        assert opened.found(False, text(900)) == (512 if whole else 0)
        assert path.exists() == whole
        assert [line.partition(": ")[2] for line in opened.lines] == [
            "the checksum of its rows does not match; it is deleted"
        ] * (not whole)
    with Opened(tmp_path) as again:
        assert again.found(False, [*text(900), 5], turn=900) == 0
        assert len(again.lines) == whole


def test_a_file_that_was_replaced_by_the_end_of_its_state(tmp_path):
    """Its base, which another process wrote too, then has the rows."""
    with Opened(tmp_path) as one:
        one.offer(False, text(1000), turn=600)
    with Opened(tmp_path / "elsewhere") as other:
        for n in (600, 1000):
            other.offer(False, text(1000)[:n], turn=600)
    with Opened(tmp_path) as one:
        for path in files(tmp_path / "elsewhere"):
            path.replace(one.disk.folder / path.name)
        assert one.found(False, [*text(550), *text(20, 1)], turn=1000) == 550
        assert one.lines == []


def test_a_file_that_was_replaced_by_one_that_continues_itself(tmp_path):
    """Its numbers are those of a state that has all its rows in other files."""
    with Opened(tmp_path) as opened:
        opened.offer(False, text(600))
        (path,) = files(tmp_path)
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["__metadata__"] |= {"first": "600", "base": path.stem}
        changed = json.dumps(header).encode()
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
        clear(opened.cache)
        assert opened.found(False, text(600)) == 0
        assert len(opened.lines) == 1
        assert "lacks the tokens" in opened.lines[0]
        assert not path.exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(8))
def test_any_texts_over_restarts(tmp_path, points, seed):
    """Whatever files are there, a prompt gets the state that reading it gives."""
    random, found = np.random.default_rng(seed), []
    for _ in range(6):
        with Opened(tmp_path, memory=int(random.choice([0, 10**6]))) as opened:
            for _ in range(4):
                tokens = texts(int(random.integers(10**6)), int(random.integers(1, 1200)))
                marks = {"turn": 300, "system": 40} if random.integers(2) else {}
                found.append(opened.found(points, tokens, **marks))
                opened.offer(points, tokens, **marks)
            assert opened.lines == []
    assert points or sum(length > 0 for length in found) > 3


def test_a_state_is_written_once_its_copies_are_complete(tmp_path, points, monkeypatch):
    """Offering it waits for nothing; copies that fail leave no file."""
    copied, tokens, save_rows = threading.Event(), text(300), Rows.save_rows
    late = []

    def save_later(self, first, last):
        late.append((np.zeros_like(rows := save_rows(self, first, last)[0]), rows))
        return [late[-1][0]]

    def wait():
        assert copied.wait(10)
        for empty, rows in late:
            empty[:] = rows

    def fail():
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(Rows, "save_rows", save_later)
    monkeypatch.setattr(Fake, "when_saved", lambda self, arrays=None: wait)
    with Opened(tmp_path, memory=0) as first:
        first.cache.offer(tokens, Fake(points, tokens))
        copied.set()
        first.disk.flush()
        monkeypatch.setattr(Fake, "when_saved", lambda self, arrays=None: fail)
        first.offer(points, text(200, 1))
        assert [line.partition(" to ")[0] for line in first.lines] == ["a state of 200 tokens is not written"]
    monkeypatch.undo()
    with Opened(tmp_path) as second:
        assert second.found(points, [*tokens, 5], turn=300) == 300
        assert second.found(points, [*text(200, 1), 5], turn=200) == 0


def test_a_file_holds_what_its_base_lacks(tmp_path):
    """Turns of one conversation are written once each, and two that share a beginning share its file."""
    tokens = text(2000)
    with Opened(tmp_path) as opened:
        for n in (1000, 1100):
            opened.offer(False, tokens[:n], turn=1000)
        opened.offer(False, [*tokens[:1000], *text(50, 1)], turn=1000)
        sizes = sorted(path.stat().st_size for path in files(tmp_path))
        assert sizes[0] < sizes[1] < 9000 < 16_000 < sizes[2]
        opened.offer(False, tokens[:1100], turn=1000)
        assert len(files(tmp_path)) == 3


def test_the_beginning_of_two_texts_is_written_once(tmp_path):
    """No state ends where the texts part, and the rows before were written with each of them."""
    texts = [[*text(1000), *text(400, seed)] for seed in (1, 2, 3)]
    with Opened(tmp_path) as opened:
        for tokens in texts:
            opened.offer(False, tokens)
    headers = [read_header(path, MODEL) for path in files(tmp_path)]
    assert sorted(header.first for header in headers) == [0, 512, 512]  # tokens 512 to 1024 are read in one long step
    for tokens in texts:
        with Opened(tmp_path, memory=0) as again:
            assert again.found(False, [*tokens, 5], end=len(tokens)) == len(tokens)
            assert again.lines == []
    first = next(header.path for header in headers if not header.first)
    first.unlink()
    with Opened(tmp_path) as again:
        assert [again.found(False, [*tokens, 5], end=len(tokens)) for tokens in texts] == [0, 0, 0]


def test_memory_may_be_smaller_than_a_state(tmp_path, points):
    with Opened(tmp_path, memory=0) as opened:
        opened.offer(points, text(100))
        assert opened.found(points, text(101)) == 100
        assert opened.cache.bytes == 0


def test_the_budget(tmp_path, points):
    """The oldest conversation goes first, and a turn never before those that continue it; other models count too."""
    with Opened(tmp_path, fingerprint=OTHER) as other:
        other.offer(points, text(400))
    size = files(tmp_path)[0].stat().st_size
    budget = 3 * size + 9000
    with Opened(tmp_path, budget) as opened:
        for seed in range(1, 7):
            tokens = text(420, seed)
            opened.offer(points, tokens[:400])
            opened.offer(points, tokens, turn=400)
            assert sum(path.stat().st_size for path in files(tmp_path)) <= budget
        opened.offer(points, text(4000))
        assert opened.lines == []
    with Opened(tmp_path, budget, memory=0) as again:
        assert again.lines == []
        assert again.found(points, [*text(420, 6), 5], turn0=400, turn1=420) == 420
        assert again.found(points, [*text(420, 1), 5], turn0=400, turn1=420) == 0
    assert not list((tmp_path / OTHER).iterdir())


def test_use_keeps_a_file(tmp_path):
    with Opened(tmp_path) as opened:
        opened.offer(True, text(400))
    size = files(tmp_path)[0].stat().st_size
    with Opened(tmp_path, 2 * size + 9000, memory=0) as opened:
        opened.offer(True, text(400, 1))
        assert opened.found(True, text(401), turn=400) == 400
        opened.offer(True, text(400, 2))
        opened.offer(True, text(400, 3))
        opened.found(True, text(401), turn=400)
        assert opened.found(True, text(401, 1), turn=400) == 0


def written(folder, n=400, more=0):
    with Opened(folder) as opened:
        opened.offer(True, text(n + more)[:n])
        if more:
            opened.offer(True, text(n + more), turn=n)
    return files(folder)


def damaged(data, header_size):
    """Bytes of a file, a line that names the fault, and whether the file is still known to be ours."""
    header = json.loads(data[8 : 8 + header_size])

    def rewritten(**changes):
        changed = json.dumps({**header, "__metadata__": {**header["__metadata__"], **changes}}).encode()
        return len(changed).to_bytes(8, "little") + changed + data[8 + header_size :]

    def flipped(at):
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return {
        "cut": (data[:-1], "is cut short", True),
        "cut in the header": (data[:200], "is cut short or is no saved state", False),
        "empty": (b"", "is cut short or is no saved state", False),
        "random": (bytes(range(256)) * 20, "is cut short or is no saved state", False),
        "longer": (data + b"x", "is cut short", True),
        "a bit": (flipped(len(data) - 10), "checksum of its point", True),
        "a bit of a row": (flipped(8 + header_size + 3000), "checksum of its rows", True),
        "a bit of a checksum": (flipped(8 + header_size + 1620), "checksum of its rows", True),
        "version": (rewritten(version="1"), "has version '1'; supported: 2", False),
        "format": (rewritten(format="other"), "is no saved state", False),
        "model": (rewritten(fingerprint=OTHER), "is a state of another model", False),
        "key": (rewritten(key="0" * 32), "has a name that does not match its tokens", True),
        "base": (rewritten(first="5", base="c" * 32), "continues a state that is gone", True),
        "first": (rewritten(first="5"), "continues token 5", True),
        "huge": (rewritten(first="9" * 11), "first is '99999999999'", True),
        "counts": (rewritten(counts="1 2"), "point.1", True),
        "fewer": (rewritten(counts="0 1"), "checksum of its rows", True),
    }


DAMAGES = list(damaged((300).to_bytes(8, "little") + b'{"__metadata__": {}}'.ljust(300) + bytes(9000), 300))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_and_one_line(tmp_path, damage):
    (path,) = written(tmp_path)
    data = path.read_bytes()
    changed, line, ours = damaged(data, int.from_bytes(data[:8], "little"))[damage]
    path.write_bytes(changed)
    with Opened(tmp_path) as opened:
        assert opened.found(True, text(401), turn=400) == 0
        assert len(opened.lines) == 1
        assert line in opened.lines[0]
        assert path.exists() == (not ours)
    with Opened(tmp_path) as again:
        again.offer(True, text(400))
        assert again.found(True, text(401), turn=400) == 400


def test_a_file_that_hides_its_point(tmp_path):
    """The state of such a model cannot be cut, whatever the file says."""
    (path,) = written(tmp_path, 600)
    path.write_bytes(path.read_bytes().replace(b'"counts": "1 1"', b'"counts": "1 0"'))
    with Opened(tmp_path) as opened:
        assert opened.disk.get(np.array(text(580), np.int32), reading_of(text(580)), 0) is not None
        assert opened.found(True, text(580)) == 0
        assert opened.found(True, text(601), turn=600) == 0
        assert "checksum of its point" in opened.lines[0]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_ignored(tmp_path, make):
    """A pipe by the name of a state held up the program for ever."""
    (path,) = written(tmp_path)
    path.unlink()
    make(path)
    with Opened(tmp_path) as opened:
        assert opened.lines == [f"{path} is not a regular file; it is ignored"]
        opened.offer(True, text(10, 1))
        assert opened.found(True, text(11, 1), turn=10) == 10
    assert path.exists()


def test_a_damaged_base_takes_its_followers_along(tmp_path):
    paths = written(tmp_path, 400, 20)
    base = max(paths, key=lambda path: path.stat().st_size)
    data = bytearray(base.read_bytes())
    data[-200] ^= 1
    base.write_bytes(data)
    with Opened(tmp_path) as opened:
        assert opened.found(True, text(430), turn0=400, turn1=420) == 0
        assert "checksum" in opened.lines[0]
    with Opened(tmp_path) as again:
        assert len(again.lines) <= 1
        again.offer(True, text(400))
        assert again.found(True, text(430), turn0=400) == 400


def test_files_of_others_stay(tmp_path):
    (path,) = written(tmp_path)
    kept = {path.with_name("notes.txt"): b"mine", tmp_path / "model.gguf": b"mine", path.with_name("f" * 32): b"mine"}
    kept[path.with_name("0" * 32 + ".state")] = b"mine"
    for name, content in kept.items():
        name.write_bytes(content)
    with Opened(tmp_path, 5000) as opened:
        opened.offer(True, text(10, 1))
        opened.offer(True, text(12, 2))
    assert all(name.read_bytes() == content for name, content in kept.items())


def test_a_file_that_another_process_deleted(tmp_path):
    (path,) = written(tmp_path)
    with Opened(tmp_path) as opened:
        path.unlink()
        assert opened.found(True, text(401), turn=400) == 0
        opened.offer(True, text(400))
        assert opened.found(True, text(401), turn=400) == 400
        assert opened.lines == []


def test_a_state_that_another_process_writes_later(tmp_path, points):
    """Files were found at the start alone."""
    with Opened(tmp_path) as one, Opened(tmp_path) as other:
        assert other.found(points, text(401), turn=100, end=400) == 0
        one.offer(points, text(100), turn=100)
        one.offer(points, text(400), turn=100)
        (other.disk.folder / f"{'0' * 32}.state").write_bytes(b"no state")
        for _ in range(2):
            clear(other.cache)
            assert other.found(points, text(401), turn=100, end=400) == 400
        assert len(other.lines) == 1  # about the file that is no state, once


def test_a_state_that_another_process_writes_too(tmp_path):
    """The second process, which lacks the file that the first one's state continues, keeps what is there."""
    with Opened(tmp_path) as one, Opened(tmp_path) as other:
        one.offer(True, text(100), turn=100)
        one.offer(True, text(400), turn=100)
        written = files(tmp_path)
        other.offer(True, text(400), turn=100)
        assert files(tmp_path) == written
        for opened in (one, other):
            clear(opened.cache)
            assert opened.found(True, text(401), turn=100, end=400) == 400
            assert opened.lines == []


def test_a_state_that_another_process_replaced(tmp_path):
    """A file may change between two reads of it; what it holds is used, and nothing is called damaged."""
    with Opened(tmp_path) as one:
        one.offer(True, text(100), turn=100)
        one.offer(True, text(400), turn=100)
        with Opened(tmp_path / "elsewhere") as other:
            other.offer(True, text(400), turn=100)
        (whole,) = files(tmp_path / "elsewhere")
        whole.replace(one.disk.folder / whole.name)
        clear(one.cache)
        assert one.found(True, text(401), turn=100, end=400) == 400
        assert one.lines == []


def test_a_file_of_the_name_of_a_waiting_state_makes_room(tmp_path, monkeypatch):
    """A process deletes the oldest file, which is another's of a state that it is about to write itself."""
    copied = threading.Event()
    with Opened(tmp_path, budget=22000) as opened, Opened(tmp_path) as other:
        other.offer(True, text(300, 1))
        monkeypatch.setattr(Fake, "when_saved", lambda self, arrays=None: copied.wait)
        for tokens in (text(500, 2), text(300, 1)):
            opened.cache.offer(tokens, Fake(True, tokens))
        copied.set()
        opened.disk.flush()
        opened.offer(True, text(60, 3))
        clear(opened.cache)
        assert opened.found(True, text(61, 3)) == 60
        assert opened.lines == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BimetalError, match="cannot be made: Not a directory"):
        PrefixDisk(tmp_path / "file" / "folder", 10**6, MODEL)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError("no 3 GB more")])
def test_a_disk_that_is_full(error, tmp_path, monkeypatch):
    def write(*_):
        raise error

    monkeypatch.setattr("common.prefix_disk.write", write)
    with Opened(tmp_path) as opened:
        opened.offer(True, text(100))
        assert "a state of 100 tokens is not written" in opened.lines[0]
        assert opened.found(True, text(101)) == 100, "the memory tier has it"
        monkeypatch.undo()
        opened.offer(True, text(90, 1))
        assert len(files(tmp_path)) == 1


def mutations(data, count):
    """Copies with flipped, cut, repeated and inserted bytes, most of them in the header."""
    rng = random.Random(0)
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(header if rng.random() < 0.8 else len(changed))
            kind = rng.randrange(5)
            if kind == 0:
                changed[at] = rng.randrange(256)
            elif kind == 1:
                del changed[at : at + rng.randint(1, 20)]
            elif kind == 2:
                changed[at:at] = rng.choice([b"9", b"-", b"]", b"null", b"1e9", b"999999999999"])
            elif kind == 3:
                changed[at : at + 1] = rng.choice(b"0123456789").to_bytes(1, "little")
            else:
                changed[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8)])
        yield bytes(changed)


def test_300_mutated_files(tmp_path, monkeypatch):
    """A state comes back whole or not at all, and nothing is allocated that the file does not have."""
    paths = written(tmp_path, 300, 20)
    path = min(paths, key=lambda path: path.stat().st_size)
    data, most = path.read_bytes(), 0

    def array(*args, **how):
        nonlocal most
        made = np.asarray(*args, **how).copy()
        most = max(most, made.nbytes)
        return made

    monkeypatch.setattr(prefix_file.np, "array", array)
    whole = 0
    for changed in mutations(data, 300):
        path.write_bytes(changed)
        try:
            saved = read(read_header(path, MODEL), 320)
        except BimetalError:
            continue
        whole += 1
        assert saved.tokens.tolist() == text(320)
        assert saved.point[0][0] == Fake(True, text(320))[0].kv.rows[..., 0].sum()
    assert whole < 250
    assert most <= len(data)


WRITER = """
import sys
sys.path[:0] = {paths!r}
from pathlib import Path
from prefix_states import Fake, reading_of, texts
from common.prefix_cache import PrefixCache
from common.prefix_disk import PrefixDisk
disk = PrefixDisk(Path({folder!r}), 120_000, {model!r})
cache = PrefixCache(b"", 10**6, disk)
print("ready", flush=True)
at = {start}
while True:
    tokens = texts(at, 100 + 97 * at % 1100)
    cache.offer(tokens, Fake(True, tokens, reading_of(tokens)))
    at += 1
"""


@pytest.mark.long
def test_a_process_killed_at_any_moment(tmp_path):
    """After each of 20 kills the folder opens without a complaint, and what it has is whole."""
    here, rng, seen = Path(__file__).parent, random.Random(1), 0
    for kill in range(20):
        paths = [str(here), str(here.parent)]
        code = WRITER.format(paths=paths, folder=str(tmp_path), model=MODEL, start=kill * 1000)
        before = set(files(tmp_path))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n", process.stderr.read()
        while not {path for path in files(tmp_path) if path.suffix != ".part"} - before:  # on a busy machine too
            assert process.poll() is None, process.stderr.read()
        time.sleep(rng.random() * 0.1)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        with Opened(tmp_path) as opened:
            assert opened.lines == []
            assert not [path for path in files(tmp_path) if path.suffix == ".part"]
            for known in list(opened.disk.known.values())[:5]:
                tokens = [*known.tokens.tolist(), 60]
                reading = Reading(len(tokens), 512, {len(known.tokens): "turn"})
                got = opened.disk.get(np.array(tokens, np.int32), reading, 0)
                if reading.continues_from(len(known.tokens), known.long_steps):
                    assert got is not None
                    assert got.tokens.tolist() == known.tokens.tolist()
                    Fake(True).load({"rows.0": got.rows[0], "point.0": got.point[0]}, len(got.tokens))
                    seen += 1
            assert opened.lines == []
    assert seen > 20, seen
