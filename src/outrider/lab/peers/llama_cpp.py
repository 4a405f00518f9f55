"""llama.cpp on the target's own .gguf file, through its server on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import IO, Any

import torch

from outrider.errors import EndpointError, ModelError, UsageError
from outrider.lab.peers import Ask, Reply, Stage, options_of
from outrider.lab.peers.wire import LostError, Wire
from outrider.models.locate import Located, locate

__all__ = ["LlamaCpp"]

_PROGRAM = "llama-server"
_HOST = "127.0.0.1"
_TOLD_S = 60.0  # for --help and --version
_READY_S = 600.0
_LEAVE_S = 10.0
_ROOM = 64  # tokens that a draft may look beyond the end
_LINES = 3  # of a server's last words in an error


class LlamaCpp:
    """``llama-server``, started on a port of the loopback and stopped in the end.

    Parameters
    ----------
    server
        The program; by default the one on PATH.
    draft
        A draft model, a .gguf file or a catalogue's name.
    lookup
        Draft by looking the last tokens up in the text (``--spec-type ngram-simple``).
    tokens
        So many at once, if given; else as many as is usual in the program.

    It has as many threads as torch has here, one slot, no reuse of a prompt that it has seen, and
    a GPU where the target is on one.

    Raises
    ------
    UsageError
        When the program is not there, or its ``--help`` has no such option.
    """

    name = "llama.cpp"
    takes = frozenset({"top_k", "top_p", "min_p"})

    def __init__(
        self, server: Path, label: str, *, draft: str = "", lookup: bool = False, tokens: str = ""
    ) -> None:
        self.label = label
        self._server, self._draft, self._lookup, self._tokens = server, draft, lookup, tokens
        self._help = _told(server, "--help")
        self._command: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._wire: Wire | None = None
        self._ends: frozenset[int] = frozenset()
        self._words: Any = None
        self._speculation = self._speculate()

    @classmethod
    def build(cls, argument: str) -> LlamaCpp:
        """``server=PATH``, and ``lookup``, ``lookup=N`` or ``draft=PATH``; or nothing."""
        found = options_of(cls.name, argument, ["server", "lookup", "draft"])
        tokens = found.get("lookup", "")
        wrong = tokens and not (tokens.isdecimal() and int(tokens))
        if wrong or found.get("draft") == "" or found.get("server") == "":
            raise UsageError(
                f"'{cls.name}' takes server=PATH, and lookup, lookup=N or draft=PATH; got "
                f"'{argument}'.",
                hint=f"Example: --peer {cls.name}:lookup",
            )
        if "lookup" in found and "draft" in found:
            raise UsageError(
                f"'{cls.name}' drafts in one way; got lookup and draft.", hint="Leave one out."
            )
        path = shutil.which(os.path.expanduser(found.get("server", _PROGRAM)))
        if path is None:
            raise UsageError(
                f"There is no program '{found.get('server', _PROGRAM)}'.",
                hint=f"Install llama.cpp, or say where it is: --peer {cls.name}:server=PATH",
            )
        label = cls.name + (f":{argument}" if argument else "")
        draft = found.get("draft", "")
        return cls(Path(path), label, draft=draft, lookup="lookup" in found, tokens=tokens)

    def start(self, stage: Stage) -> None:
        """Start the server and wait until its model is loaded.

        Raises
        ------
        UsageError
            When the target is no .gguf file, or has an adapter.
        ModelError
            When the server cannot load it.
        """
        self._command = self._asked(stage)
        self._words = stage.engine.tokenizer
        self._ends = frozenset() if self._words is None else self._words.eos_token_ids
        self._launch()

    def about(self) -> dict[str, str]:
        """The program's version, and how it was started."""
        told = _told(self._server, "--version")
        version = next((line for line in told.splitlines() if "version" in line), "version unknown")
        at = self._command.index("--port")
        return {
            "version": f"llama.cpp {version.removeprefix('version:').strip()}",
            "program": str(self._server),
            "arguments": " ".join(self._command[1:at] + self._command[at + 2 :]),
            "weights": "the target's .gguf file",
            "precision": "the file's own",
            "prompts": "token ids",
            "time": "on the client's side, over the loopback",
        }

    def answer(self, ask: Ask) -> Reply:
        """One streamed completion, from sending the request to the end of the stream.

        Raises
        ------
        EndpointError
            When there is no answer. The next prompt has another server if this one is lost.
        """
        if self._process is None or self._process.poll() is not None or self._wire is None:
            self.stop()
            self._launch()
        assert self._wire is not None
        try:
            return self._streamed(self._wire, ask)
        except LostError:
            self.stop()  # a server that is dying may still look alive when the next prompt comes
            raise

    def _streamed(self, wire: Wire, ask: Ask) -> Reply:
        ids: list[int] = []
        parts: list[str] = []
        last: dict[str, Any] = {}
        first_s = 0.0
        started = perf_counter()
        for event in wire.events("/completion", _body(ask)):
            new = [one for one in event.get("tokens") or () if isinstance(one, int)]
            piece = str(event.get("content") or "")
            if new or piece:  # newer servers begin with an event that has neither
                first_s = first_s or perf_counter() - started
            ids += new
            parts.append(piece)
            last = event
        total_s = perf_counter() - started
        if not last.get("stop"):
            raise LostError("llama-server ended its stream before the answer's end.")
        count = int(last.get("tokens_predicted") or len(ids))
        limited = last.get("stop_type") == "limit" or bool(last.get("stopped_limit"))
        # Tokens inside an incomplete character are not streamed, and then not all are known.
        known = len(ids) == count
        return Reply(
            text="".join(parts),
            tokens=count,
            counted="ids" if known else "usage",
            ttft_s=first_s or total_s,
            total_s=total_s,
            finish_reason="length" if limited else "stop",
            token_ids=ids if known else (),
        )

    def stop(self) -> None:
        """End the server, kindly and then not."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        process, self._process = self._process, None
        if process is not None:
            try:
                process.terminate()
                process.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
                process.wait()
        if self._said is not None:
            self._said.close()
            self._said = None

    def _speculate(self) -> list[str]:
        if self._draft:
            # The oldest programs take a draft as it is, later ones want to be told how to use it.
            how = ["--spec-type", "draft-simple"] * ("draft-simple" in self._help)
            return [*how, self._option("--model-draft", "--spec-draft-model")]
        if not self._lookup:
            return []
        found = [self._option("--spec-type"), "ngram-simple"]
        if self._tokens:
            names = "--spec-ngram-simple-size-m", "--spec-ngram-size-m", "--draft-max"
            found += [self._option(*names), self._tokens]
        return found

    def _option(self, *names: str) -> str:
        """The first of several spellings that the program has."""
        for name in names:
            if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", self._help):
                return name
        raise UsageError(
            f"'{self._server}' has no option {' or '.join(names)}, which '{self.label}' needs.",
            hint="Use a newer llama.cpp.",
        )

    def _asked(self, stage: Stage) -> list[str]:
        """The command line; ``--port`` stands in it with a value that is made at each start."""
        located = stage.engine.located
        model = None if located is None else _gguf(located)
        if model is None:
            raise UsageError(
                f"'{self.name}' runs .gguf files; '{stage.engine.model.name}' is none.",
                hint="Give the target as a .gguf file, or leave this --peer out.",
            )
        if located is not None and located.adapter is not None:
            raise UsageError(
                f"'{self.name}' is not given the target's adapter.", hint="Leave this --peer out."
            )
        threads = str(torch.get_num_threads())
        on_gpu = str(getattr(stage.engine.model, "device", "cpu")).startswith("cuda")
        command = [str(self._server), "--model", str(model), "--host", _HOST, "--port", "0"]
        command += ["--ctx-size", str(stage.capacity + _ROOM), "--parallel", "1"]
        command += ["--threads", threads, "--threads-batch", threads]
        command += ["--n-gpu-layers", "999" if on_gpu else "0"]
        if not on_gpu and "--device" in self._help:
            command += ["--device", "none"]
        if self._draft:
            draft = _gguf(locate(self._draft))
            if draft is None:
                raise UsageError(f"The draft '{self._draft}' is no .gguf file.")
            return [*command, *self._speculation, str(draft)]
        return [*command, *self._speculation]

    def _launch(self) -> None:
        with socket.socket() as found:
            found.bind((_HOST, 0))
            port = found.getsockname()[1]
        command = list(self._command)
        command[command.index("--port") + 1] = str(port)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115, closed in stop
        try:
            # Of a group of its own: a Ctrl-C is ours, and ends it when the figures are told.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"'{self._server}' cannot be run: {error.strerror}.") from error
        self._wire = Wire(f"http://{_HOST}:{port}")
        deadline = monotonic() + _READY_S
        while True:
            ended = self._process.poll()
            if ended is not None or monotonic() > deadline:
                what = "was not ready in time" if ended is None else f"ended with code {ended}"
                raise ModelError(
                    f"llama-server {what}: {self._last_words()}",
                    hint="Try the same by hand: " + " ".join(command),
                )
            try:
                self._wire.get("/health")
                return
            except EndpointError:
                sleep(0.05)

    def _last_words(self) -> str:
        assert self._said is not None
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        return " / ".join([line.strip() for line in lines if line.strip()][-_LINES:]) or "no words"


def _gguf(located: Located) -> Path | None:
    return located.path if located.kind == "gguf" else None


def _told(server: Path, option: str) -> str:
    """What the program says to an option, on whichever stream."""
    try:
        done = subprocess.run(
            [str(server), option], capture_output=True, text=True, errors="replace", timeout=_TOLD_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"'{server} {option}' does not run: {error}.", hint="Is it a llama-server?"
        ) from error
    return done.stdout + done.stderr


def _body(ask: Ask) -> dict[str, Any]:
    """The same steps in the same order as here; all else that the server would do is off."""
    return {
        "prompt": list(ask.ids),
        "n_predict": ask.max_tokens,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
        "temperature": ask.temperature,
        "seed": ask.seed % (1 << 32),
        "ignore_eos": ask.ignore_eos,
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        **ask.sampling,
    }
