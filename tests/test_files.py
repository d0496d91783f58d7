"""Files are replaced whole; links, pipes and devices are written through."""

import errno
import json
import os
import resource
import threading
from pathlib import Path

import pytest
import tiny
from tiny_chat import write

from common.errors import UsageError
from common.files import check_output, rewrite, rewriting
from generate import bench_log
from generate.__main__ import main


def test_a_regular_file_is_replaced_and_keeps_its_mode(tmp_path):
    file = tmp_path / "a"
    file.write_text("old, and longer")
    file.chmod(0o600)
    rewrite(file, "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o600)
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_leaves_the_old_content(tmp_path):
    file = tmp_path / "a"
    file.write_text("old")

    def fail():
        with rewriting(file) as out:
            out.write(b"ne")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "other").mkdir()
    link, target = tmp_path / "link", tmp_path / "other" / "target"
    link.symlink_to(target)
    for text in ("made", "replaced"):
        rewrite(link, text)
        assert link.is_symlink()
        assert target.read_text() == text


def test_a_link_to_itself_is_refused(tmp_path):
    """It was replaced by a regular file."""
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        rewrite(link, "new")
    assert link.is_symlink()


def test_a_pipe_gets_the_bytes_in_order(tmp_path):
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with rewriting(pipe) as out:
        out.write(b"0000, then more")
        out.seek(0)
        out.write(b"1111")
    reader.join(10)
    assert got == [b"1111, then more"]
    assert pipe.is_fifo()


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(IsADirectoryError), rewriting(tmp_path):
        pass


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_device_is_written_through(tmp_path, capsys):
    """The node was replaced by a regular file, where its folder could be written."""
    model, text = write(tmp_path / "model"), tmp_path / "text"
    text.write_text("hello hello hello hello")
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    flags = ["--model", str(model), "--backend", "numpy", "--text", str(text), "--ctx-window", "8"]
    assert main(["perplexity", *flags, "--save-reference", str(link)]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert link.is_symlink()
    assert not Path("/dev/full").is_file()
    link.unlink()
    link.symlink_to("/dev/null")
    assert main(["perplexity", *flags, "--save-reference", str(link), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scored"] > 0
    assert link.is_symlink()


@pytest.mark.parametrize(
    "command",
    [
        ["quantize", str(tiny.FOLDER / "qwen3"), "out"],
        ["quantize", str(tiny.FOLDER / "qwen3"), "out.gguf"],
        ["pack", str(tiny.FOLDER / "laguna"), "out"],
        ["perplexity", "model", "--text", "text", "--ctx-window", "8", "--backend", "numpy", "--save-reference", "out"],
    ],
)
def test_a_full_disk_names_the_result(command, tmp_path, monkeypatch, capsys):
    """`error: system: No space left on device` named nothing."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model")
    (tmp_path / "text").write_text("hello " * 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # as if the disk were full
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    name = next(word for word in command if word.startswith("out"))
    assert capsys.readouterr().err == f"error: {name}: {os.strerror(errno.EFBIG)}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_names_the_log():
    with pytest.raises(OSError, match="/dev/full"):
        bench_log.log(Path("/dev/full"), [])


def read_only(*_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/folder/part")


def test_an_error_of_a_folder_names_the_file(tmp_path, monkeypatch):
    """It named the partial file, which the user has never heard of."""
    monkeypatch.setattr(Path, "unlink", read_only)
    file = tmp_path / "no" / "a"
    with pytest.raises(FileNotFoundError) as caught:
        rewrite(file, "new")
    assert caught.value.filename == str(file)


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    file, text, link = (tmp_path / name for name in ("file", "text", "link"))
    text.touch()
    link.symlink_to(text)
    check_output(file, [text])
    check_output(text)
    assert sorted(os.listdir(tmp_path)) == ["link", "text"]
    for output in (text, link):
        with pytest.raises(UsageError, match=f"{output} is an input, {text}, and would be overwritten"):
            check_output(output, [text])
    monkeypatch.setattr("common.files.TemporaryFile", read_only)
    check_output(Path(os.devnull), [Path(os.devnull)])
    for output in (file, text):
        with pytest.raises(OSError, match="Read-only") as caught:
            check_output(output)
        assert caught.value.filename == str(output)
