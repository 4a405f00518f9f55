"""Other programs in the same turns: transformers on a small model, and servers made up here."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import Engine
from outrider.cli.bench import app
from outrider.cli.main import main
from outrider.cli.report import app as report
from outrider.engine.prompts import PromptRecord
from outrider.errors import EndpointError, LogError, ModelError, UnknownNameError, UsageError
from outrider.lab.bench import Bench, check_measurable
from outrider.lab.configuration import Configuration
from outrider.lab.metrics import all_metrics
from outrider.lab.peers import Ask, Peer, Reply, Stage, changed, options_of, parse_peer, running
from outrider.lab.record import Log, Record, Run
from outrider.lab.summary import summarize
from outrider.lab.table import table_rows
from outrider.lab.wording import conclusions, notes, peer_lines
from outrider.models import attention
from outrider.models.hf import HFModel
from outrider.models.locate import Located
from outrider.registry import PEERS
from tests.patience import HANGS_S
from tests.servers import Loopback
from tests.small_models import new_module, new_tokenizer, save

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [PromptRecord(str(i), "letters", text) for i, text in enumerate(["abab", "bcbc", "ca"])]


@pytest.fixture
def toy() -> Engine:
    return Engine.load("toy:vocab=4,seed=1", drafter="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save(new_module("llama"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    return save(new_module("llama", seed=1), tmp_path_factory.mktemp("draft"))


class Parrot:
    """Says plain decoding's tokens, and fails where it is told to."""

    name = label = "parrot"
    takes = frozenset({"top_k"})

    def __init__(self, engine: Engine, fails: tuple[int, ...] = (), wrong: bool = False) -> None:
        self.engine, self.fails, self.wrong = engine, fails, wrong
        self.asked: list[Ask] = []
        self.running = False

    @classmethod
    def build(cls, argument: str) -> Parrot:
        raise NotImplementedError

    def start(self, stage: Stage) -> None:
        self.running = True

    def about(self) -> dict[str, str]:
        return {"version": "parrot 1", "precision": "feathers"}

    def answer(self, ask: Ask) -> Reply:
        assert self.running
        self.asked.append(ask)
        if len(self.asked) in self.fails:
            raise RuntimeError("no seeds left\nsecond line")
        out = self.engine.generate(ask.ids, max_tokens=ask.max_tokens, plain=True)
        ids = [*out.token_ids]
        ids[-1] = (ids[-1] + self.wrong) % 4
        return Reply(out.text, len(ids), "ids", 0.25, 2.0, "length", ids)

    def stop(self) -> None:
        self.running = False


def measure(engine: Engine, peer: Any, **options: Any) -> list[Record]:
    bench = Bench(
        engine, PROMPTS, [Configuration("ngram")], peers=[peer], max_tokens=8, entropies=False,
        **options,
    )  # fmt: skip
    with running(bench.peers, bench.stage):
        return list(bench.run())


class TestTurns:
    def test_a_peer_takes_its_turn_at_every_prompt(self, toy):
        peer = Parrot(toy)
        made = measure(toy, peer, repeats=2)
        assert isinstance(peer, Peer)
        assert len(made) == 2 * 3 * 3
        assert [r.prompt for r in made[:9]] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        own = [r for r in made if r.peer]
        assert [r.configuration for r in own] == ["parrot"] * 6
        assert len({r.order for r in own}) > 1
        assert [list(a.ids) for a in peer.asked[:3]] == [toy.encode(p.prompt) for p in PROMPTS]
        assert [a.seed for a in peer.asked[:3]] == [0, 1, 2]
        assert {a.max_tokens for a in peer.asked} == {8}
        assert not peer.running

    def test_without_peers_the_order_is_what_it_was(self, toy):
        def orders(**more):
            made = Bench(toy, PROMPTS, [Configuration("ngram")], repeats=5, **more)
            return [[one.label for one in turn.order] for turn in made.turns()]

        assert orders() == orders(peers=())
        assert all("parrot" in order for order in orders(peers=[Parrot(toy)]))

    def test_the_context_limits_a_peer_as_it_does_the_engine(self):
        small = Engine.load("toy:vocab=4,context=7", drafter="none")
        peer = Parrot(small)
        measure(small, peer)
        assert [a.max_tokens for a in peer.asked] == [3, 3, 5]

    def test_what_is_done_is_not_asked_again(self, toy):
        peer = Parrot(toy, fails=(2,))
        bench = Bench(toy, PROMPTS, [], peers=[peer], max_tokens=8)
        with running(bench.peers, bench.stage):
            made = list(bench.run())
            assert sum(bool(r.failure) for r in made) == 1
            assert list(bench.run({r.key for r in made})) == []
        assert len(peer.asked) == 3

    def test_what_cannot_be_measured_is_refused(self, toy):
        peer = Parrot(toy)
        with pytest.raises(UsageError, match="no top_p"):
            check_measurable([], [1.0], peers=[peer], sampling={"top_p": 0.5})
        check_measurable([], [1.0], peers=[peer], sampling={"top_k": 5, "top_p": 1.0})
        with pytest.raises(UsageError, match="Two configurations are called 'parrot'"):
            check_measurable([], [0.0], peers=[peer, peer])
        with pytest.raises(UsageError, match="one prompt at a time"):
            check_measurable([], [0.0], peers=[peer], batches=[1, 2])

    def test_what_changes_nothing_is_no_wish(self):
        assert changed({"top_k": 0, "min_p": 0.0, "logit_bias": None, "temperature": 1.0}) == {}
        assert changed({"presence_penalty": -1.0}) == {"presence_penalty": -1.0}

    def test_all_are_stopped_when_one_cannot_start(self, toy):
        class Broken(Parrot):
            label = "broken"

            def start(self, stage):
                super().start(stage)
                raise ModelError("no")

        good, bad = Parrot(toy), Broken(toy)
        with pytest.raises(ModelError), running([good, bad], Stage(toy, 9)):
            raise AssertionError
        assert not good.running
        assert not bad.running


class TestFigures:
    def test_a_record_without_rounds(self, toy):
        (one, *_) = [r for r in measure(toy, Parrot(toy)) if r.peer]
        assert (one.rounds, one.emitted, one.counted) == ([], 8, "ids")
        found = {name: metric.of(one) for name, metric in all_metrics().items()}
        assert {name: value for name, value in found.items() if value is not None} == {
            "tokens_per_s": 4.0, "ttft_ms": 250.0, "total_ms": 2000.0, "tpot_ms": 1750 / 7,
        }  # fmt: skip
        assert Record.from_dict(json.loads(json.dumps(one.to_dict()))) == one
        assert "summary" not in one.to_dict()

    def test_a_summary(self, toy):
        conditions = {
            "peers": [{"label": "parrot"}],
            "targets": {"bare": {"precision": None, "peers": {"parrot": Parrot(toy).about()}}},
        }
        summary = summarize(Run(conditions, measure(toy, Parrot(toy, fails=(2,)))))
        plain, _, row = summary.rows
        assert [r.configuration for r in summary.rows] == ["plain", "ngram", "parrot"]
        assert (plain.peer, row.peer, row.records, row.prompts) == (False, True, 3, 3)
        assert row.failed == ((1, "no seeds left"),)
        assert row.metrics["tokens_per_s"].n == row.speedup.n == 2
        assert row.metrics["acceptance_rate"] is None
        assert (row.same.compared, row.same.same, row.same.promised) == (2, 2, False)
        assert "parrot" not in {one.configuration for one in summary.strata}
        told = list(notes(summary))
        assert any("parrot at temperature 0, 1 of 3 (first prompt 2: no seeds left)" in n
                   for n in told)  # fmt: skip
        assert any("the target's (exact)" in n and "parrot (feathers)" in n for n in told)
        assert list(peer_lines(summary)) == ["parrot: parrot 1; precision: feathers"]
        (said,) = conclusions(summary)
        assert "other programs: parrot " in said
        assert "parrot" not in said.partition("other programs")[0]
        json.dumps(summary.to_dict())

    def test_other_tokens_are_told_and_no_fault(self, toy):
        summary = summarize(Run({}, measure(toy, Parrot(toy, wrong=True))))
        same = summary.rows[-1].same
        assert (same.compared, same.same) == (3, 0)
        assert same.parted[0].position == 7
        assert not any("they should be" in note for note in notes(summary))

    def test_sampled_tokens_are_not_compared(self, toy):
        summary = summarize(Run({}, measure(toy, Parrot(toy), temperatures=(1.0,))))
        assert summary.rows[-1].same is None

    def test_nothing_but_failures(self, toy):
        summary = summarize(Run({}, measure(toy, Parrot(toy, fails=(1, 2, 3)))))
        row = summary.rows[-1]
        assert (row.speedup, row.same, len(row.failed)) == (None, None, 3)
        assert all(value is None for value in row.metrics.values())

    def test_rows_of_a_table(self, toy):
        made = measure(toy, Parrot(toy, fails=(2,)))
        rows = [row for row in table_rows(Run({}, made)) if row["peer"]]
        good, bad = rows[0], rows[1]
        assert (good["emitted_tokens"], good["same_tokens_as_plain"]) == (8, True)
        assert (good["target_calls"], good["accepted_tokens"]) == (None, None)
        assert (bad["failure"], bad["emitted_tokens"], bad["same_tokens_as_plain"]) == (
            "no seeds left", None, None,
        )  # fmt: skip

    def test_the_page_has_it_in_its_table_alone(self, toy):
        pytest.importorskip("jinja2")
        from outrider.report.bench import bench_page
        from outrider.report.figures import measured

        run = Run({"target": "toy"}, measure(toy, Parrot(toy)))
        assert [arm.label for arm in measured(run).drafted] == ["ngram"]
        assert "parrot" in bench_page(run)


class TestNames:
    @pytest.mark.parametrize("name", PEERS)
    def test_every_entry_loads_and_answers_to_its_name(self, name):
        assert PEERS.load(name).name == name

    @pytest.mark.parametrize(
        ("text", "error", "words"),
        [
            ("tranformers", UnknownNameError, "Did you mean 'transformers'"),
            ("transformers:asisted=x", UsageError, "Did you mean 'assisted'"),
            ("transformers:lookup=0", UsageError, "N from 1"),
            ("transformers:lookup=x", UsageError, "N from 1"),
            ("transformers:assisted=", UsageError, "assisted=PATH"),
            ("transformers:assisted=a,lookup=3", UsageError, "or lookup=N"),
            ("llama.cpp:server=/no/such", UsageError, "no program '/no/such'"),
            ("llama.cpp:lookup,draft=x", UsageError, "one way"),
            ("llama.cpp:lookup=x", UsageError, "lookup=N"),
            ("endpoint:", UsageError, "http or https"),
            ("endpoint:ftp://a", UsageError, "http or https"),
            ("endpoint:http://me:key@a", UsageError, "a user"),
        ],
    )
    def test_mistakes_are_told_plainly(self, text, error, words):
        with pytest.raises(error, match=words):
            parse_peer(text)

    def test_labels_are_what_was_asked_for(self):
        for text in ("transformers", "transformers:lookup=10", "transformers:assisted=a/b"):
            assert parse_peer(text).label == text

    def test_only_a_known_key_parts(self):
        keys = ["server", "lookup", "draft"]
        assert options_of("x", "server=/a,b,lookup=3", keys) == {"server": "/a,b", "lookup": "3"}
        assert options_of("x", "", keys) == {}
        with pytest.raises(UsageError, match="twice"):
            options_of("x", "lookup,lookup", keys)

    def test_openvino_says_what_to_install(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "openvino_genai", None)
        with pytest.raises(UsageError, match="pip install openvino-genai"):
            parse_peer("openvino")

    def test_servers_need_a_package_that_is_told(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "httpx2", None)
        with pytest.raises(UsageError, match=r"pip install outrider\[audit\]"):
            parse_peer("endpoint:http://localhost:1")


WORDS = [PromptRecord("1", "words", "w5 w6 w5 w6"), PromptRecord("2", "words", "w9 w4 w7")]


class TestTransformers:
    @pytest.fixture
    def engine(self, folder) -> Engine:
        return Engine.load(str(folder), drafter="none", runtime="hf", dtype="float32")

    def answer(self, engine: Engine, name: str, **ask: Any) -> Reply:
        peer = parse_peer(name)
        with running([peer], Stage(engine, 64)):
            return peer.answer(Ask(**({"ids": [5, 6, 5, 6], "prompt": "", "max_tokens": 12} | ask)))

    @pytest.mark.parametrize("how", ["", ":lookup=4", ":assisted=DRAFT"])
    def test_greedy_tokens_are_ours(self, engine, draft, how):
        plain = engine.generate([5, 6, 5, 6], max_tokens=12)
        reply = self.answer(engine, "transformers" + how.replace("DRAFT", str(draft)))
        assert list(reply.token_ids) == plain.token_ids
        assert (reply.tokens, reply.text) == (len(plain.token_ids), plain.text)
        assert reply.finish_reason == plain.finish_reason
        assert 0 < reply.ttft_s <= reply.total_s

    def test_the_module_is_the_targets_own_and_left_as_it_was(self, engine):
        assert isinstance(engine.model, HFModel)
        module = engine.model.module
        before = module.generation_config
        used = []
        plain = module.forward

        def seen(*args, **kwargs):
            used.append(module.config._attn_implementation)
            return plain(*args, **kwargs)

        module.forward = seen
        try:
            self.answer(engine, "transformers", max_tokens=2)
        finally:
            del module.forward
        assert set(used) == {"sdpa"}
        assert module.config._attn_implementation == attention.NAME
        assert module.generation_config is before

    def test_end_tokens_and_going_past_them(self, engine):
        # Token 2 ends an output: make whatever comes first end it.
        first = engine.generate([5, 6, 5, 6], max_tokens=1).token_ids[0]
        engine.tokenizer._eos = frozenset({first})
        reply = self.answer(engine, "transformers")
        assert (list(reply.token_ids), reply.finish_reason) == ([first], "stop")
        engine.model.module.generation_config.eos_token_id = first
        reply = self.answer(engine, "transformers", ignore_eos=True)
        assert (reply.tokens, reply.finish_reason) == (12, "length")

    def test_sampling_has_a_seed_and_leaves_torchs_alone(self, engine):
        ask = {"temperature": 1.0, "seed": 3}
        state = torch.random.get_rng_state()
        one = self.answer(engine, "transformers", **ask)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert one.token_ids == self.answer(engine, "transformers", **ask).token_ids
        other = self.answer(engine, "transformers", temperature=1.0, seed=4)
        assert other.token_ids != one.token_ids
        greedy = self.answer(engine, "transformers")
        only = self.answer(engine, "transformers", **ask, sampling={"top_k": 1})
        assert only.token_ids == greedy.token_ids
        config = parse_peer("transformers")._config(Ask([0], "", 1, temperature=1.0), [2])
        assert (config.top_k, config.top_p) == (0, 1.0)  # its own top_k of 50 is off

    def test_beside_another_runtime_it_is_loaded_once_more_and_once(self, folder, monkeypatch):
        engine = Engine.load(str(folder), drafter="none", runtime="native", dtype="int8")
        loads = []
        from outrider.lab import peers

        real = peers.load_model
        monkeypatch.setattr(peers, "load_model", lambda *a, **k: loads.append(k) or real(*a, **k))
        both = [parse_peer("transformers"), parse_peer("transformers:lookup=3")]
        bench = Bench(engine, WORDS, [], peers=both, max_tokens=6, entropies=False)
        with running(bench.peers, bench.stage):
            made = list(bench.run())
            about = bench.about()
        assert [k["runtime"] for k in loads] == ["hf"]
        told = about["peers"]["transformers"]
        assert "loaded once more" in told["weights"]
        assert told["precision"] in ("float32", "bfloat16")
        assert about["precision"] == "int8"
        assert sum(r.peer and r.emitted > 0 for r in made) == 4
        said = list(notes(summarize(Run({"targets": {"bare": about}}, made))))
        assert any("the target's (int8)" in note for note in said)

    def test_the_targets_precision_is_kept_where_it_can_be(self, folder):
        engine = Engine.load(str(folder), drafter="none", runtime="native", dtype="float32")
        assert Stage(engine, 9).hf.kind == "float32"

    def test_a_toy_is_no_model_of_transformers(self, toy):
        with pytest.raises(UsageError, match="no model that transformers has"):
            parse_peer("transformers").start(Stage(toy, 9))

    def test_from_the_command_line(self, folder, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "160")
        words = tmp_path / "words.txt"
        words.write_text("w5 w6 w5 w6\nw7 w8 w7 w8\n")
        log = tmp_path / "log.jsonl"
        asked = ["-t", str(folder), "--runtime", "hf", "--dtype", "float32", "-n", "6",
                 "--prompts", str(words), "-d", "ngram", "--log", str(log)]  # fmt: skip
        peers = ["--peer", "transformers", "--peer", "transformers:lookup=4"]
        rows = tmp_path / "rows.csv"
        result = CliRunner().invoke(app, [*asked, *peers, "--csv", str(rows)])
        assert result.exit_code == 0, result.output
        assert "transformers peer" in result.stdout
        assert "precision: float32" in result.stdout
        assert result.stdout.count("2 of 2") == 3
        assert len(list(csv.DictReader(io.StringIO(rows.read_text())))) == 8
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(lines[:-3]))
        found = json.loads(CliRunner().invoke(app, [*asked, *peers, "--json"]).stdout)
        assert (found["finished"], found["planned"]) == (8, 8)
        shown = json.loads(CliRunner().invoke(report, [str(log), "--json"]).stdout)
        assert shown == found
        with pytest.raises(LogError, match="peers"):
            CliRunner().invoke(app, [*asked, *peers[:2]], catch_exceptions=False)


# --- a llama-server that is none ----------------------------------------------------------------

SERVER = """
import json, os, socket, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--help" in sys.argv:
    print("--model F  --device D  --model-draft F  OPTIONS"); sys.exit()
if "--version" in sys.argv:
    print("version: 1234 (abcdef)", file=sys.stderr); sys.exit()
value = lambda name: sys.argv[sys.argv.index(name) + 1]
if "bad" in value("--model"):
    print("error loading model", file=sys.stderr); sys.exit(3)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
        self.wfile.write(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(value("--model") + ".asked", "a") as log:
            log.write(json.dumps({"argv": sys.argv, "body": body}) + "\\n")
        if body["prompt"][0] == 2:
            self.send_response(500); self.end_headers()
            self.wfile.write(b'{"error": {"message": "no slot"}}'); return
        self.send_response(200); self.end_headers()
        def event(**told):
            self.wfile.write(b"data: " + json.dumps(told).encode() + b"\\n\\n")
        event(content="", tokens=[])
        if body["prompt"][0] == 1:  # gone for the client, and not yet for who looks at processes
            self.connection.shutdown(socket.SHUT_RDWR); time.sleep(1.0); os._exit(1)
        for i in range(body["n_predict"]):
            event(content=chr(97 + i % 4), tokens=[] if body["prompt"][0] == 3 and i == 1 else [i % 4])
        event(content="", tokens=[], stop=True, stop_type="limit", tokens_predicted=body["n_predict"])
    def log_message(self, *args): pass
HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""  # noqa: E501


@pytest.fixture
def program(tmp_path) -> Path:
    return make_program(tmp_path, "--spec-type T  --spec-ngram-simple-size-m N")


def make_program(folder: Path, options: str) -> Path:
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable}\n" + SERVER.replace("OPTIONS", options))
    path.chmod(0o755)
    return path


@pytest.fixture
def gguf(toy, tmp_path) -> Engine:
    """A toy that says its weights are in a file."""
    file = tmp_path / "model.gguf"
    file.touch()
    toy._located = Located("gguf", "model", path=file)
    return toy


def asked(engine: Engine) -> list[dict[str, Any]]:
    lines = Path(f"{engine.located.path}.asked").read_text().splitlines()
    return [json.loads(line) for line in lines]


class TestLlamaCpp:
    def test_a_bench_with_it(self, gguf, program):
        peer = parse_peer(f"llama.cpp:server={program}")
        prompts = [PromptRecord(c, "letters", c) for c in ("ab", "ca", "bc", "da", "ad")]
        bench = Bench(gguf, prompts, [], peers=[peer], max_tokens=6, entropies=False)
        with running([peer], bench.stage):
            process = peer._process
            made = {r.prompt: r for r in bench.run() if r.peer}
        assert process.poll() is not None
        assert peer._process is None
        # "ca" is refused, "bc" kills the server; the next prompt has another one.
        assert [made[n].failure != "" for n in range(5)] == [False, True, True, False, False]
        assert "status 500, no slot" in made[1].failure
        assert made[0].token_ids == [0, 1, 2, 3, 0, 1]
        assert (made[0].text, made[0].counted, made[0].finish_reason) == ("abcdab", "ids", "length")
        assert 0 < made[0].ttft_s <= made[0].total_s
        # A token that was not streamed: the ids are not all known, their number is.
        assert (made[3].token_ids, made[3].tokens, made[3].counted) == ([], 6, "usage")

    def test_what_it_is_asked(self, gguf, program):
        peer = parse_peer(f"llama.cpp:server={program},lookup=9")
        ask = Ask([0, 1], "", 3, temperature=0.5, seed=7, sampling={"top_k": 2}, ignore_eos=True)
        with running([peer], Stage(gguf, 100)):
            peer.answer(ask)
            about = peer.about()
        (one,) = asked(gguf)
        body, argv = one["body"], one["argv"]
        assert (body["prompt"], body["n_predict"], body["seed"]) == ([0, 1], 3, 7)
        assert (body["temperature"], body["top_k"], body["top_p"]) == (0.5, 2, 1.0)
        assert (body["cache_prompt"], body["ignore_eos"], body["stream"]) == (False, True, True)
        assert body["samplers"][0] == "temperature"
        assert argv[argv.index("--host") + 1] == "127.0.0.1"
        assert int(argv[argv.index("--ctx-size") + 1]) >= 100
        assert argv[argv.index("--threads") + 1] == str(torch.get_num_threads())
        assert argv[argv.index("--n-gpu-layers") + 1] == "0"
        tail = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-m", "9"]
        assert argv[-4:] == tail
        assert about["version"] == "llama.cpp 1234 (abcdef)"
        assert "--port" not in about["arguments"]
        assert "ngram-simple" in about["arguments"]

    def test_a_draft(self, gguf, program, tmp_path):
        small = tmp_path / "small.gguf"
        small.write_bytes(b"GGUF" + bytes(20))
        peer = parse_peer(f"llama.cpp:server={program},draft={small}")
        with running([peer], Stage(gguf, 100)):
            peer.answer(Ask([0], "", 1))
        assert asked(gguf)[0]["argv"][-2:] == ["--model-draft", str(small)]

    def test_an_old_program_has_no_lookup(self, tmp_path):
        old = make_program(tmp_path, "")
        with pytest.raises(UsageError, match="no option --spec-type"):
            parse_peer(f"llama.cpp:server={old},lookup")

    def test_it_is_found_on_the_path(self, program, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(UsageError, match="no program 'llama-server'"):
            parse_peer("llama.cpp")
        monkeypatch.setenv("PATH", str(program.parent))
        assert parse_peer("llama.cpp").label == "llama.cpp"

    def test_a_server_that_does_not_come_up_says_why(self, gguf, program, tmp_path):
        bad = tmp_path / "bad.gguf"
        bad.touch()
        gguf._located = Located("gguf", "bad", path=bad)
        peer = parse_peer(f"llama.cpp:server={program}")
        with (
            pytest.raises(ModelError, match=r"ended with code 3: error loading model"),
            running([peer], Stage(gguf, 9)),
        ):
            raise AssertionError
        assert peer._process is None

    def test_it_runs_files_of_its_own_kind_without_adapters(self, toy, program, tmp_path):
        peer = parse_peer(f"llama.cpp:server={program}")
        with pytest.raises(UsageError, match=r"runs \.gguf files"):
            peer.start(Stage(toy, 9))
        toy._located = Located("gguf", "m", path=tmp_path / "m.gguf", adapter=tmp_path)
        with pytest.raises(UsageError, match="adapter"):
            peer.start(Stage(toy, 9))

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_no_server_is_left_behind(self, program, tmp_path, number, code):
        (tmp_path / "m.gguf").touch()
        script = f"""
            import sys, time
            from pathlib import Path
            from outrider import Engine
            from outrider.lab.peers import Stage, parse_peer, running
            from outrider.models.locate import Located
            engine = Engine.load("toy:vocab=4", drafter="none")
            engine._located = Located("gguf", "m", path=Path({str(tmp_path / "m.gguf")!r}))
            peer = parse_peer("llama.cpp:server={program}")
            try:
                with running([peer], Stage(engine, 9)):
                    print(peer._process.pid, flush=True)
                    time.sleep(3600)
            except KeyboardInterrupt:
                sys.exit(130)
        """
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            text=True,
            # A shell starts background jobs with the signal ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        server = int(process.stdout.readline())
        os.kill(server, 0)  # it is there
        process.send_signal(number)
        assert process.wait(HANGS_S) == code
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)


# --- a server of OpenAI's protocol --------------------------------------------------------------


class Streaming(Loopback):
    """Streams ``pieces``; what it does is changed by its fields."""

    def __init__(self) -> None:
        self.pieces = ["a", "bc", "d"]
        self.usage: int | None = 4
        self.finish: str | None = "length"
        self.models = ["mine"]
        self.refuses: tuple[str, ...] = ()
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []

    def handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                listed = [{"id": name} for name in owner.models]
                self.wfile.write(json.dumps({"data": listed}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.bodies.append(body)
                owner.paths.append(self.path)
                owner.keys.append(self.headers.get("Authorization"))
                refused = [name for name in owner.refuses if name in body]
                self.send_response(400 if refused else owner.status)
                self.end_headers()
                if refused or owner.status != 200:
                    key = self.headers.get("Authorization")
                    told = {"error": {"message": f"not {refused} {key}"}}
                    self.wfile.write(json.dumps(told).encode())
                    return
                for event in owner._events("messages" in body):
                    self.wfile.write(b": a comment\n\ndata: " + event + b"\n\n")
                    self.wfile.flush()
                    time.sleep(0.01)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def _events(self, chat: bool) -> Iterator[bytes]:
        def choice(text: str, finish: str | None = None) -> bytes:
            said: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            return json.dumps({"choices": [said | {"finish_reason": finish}]}).encode()

        yield choice("")
        for piece in self.pieces:
            yield choice(piece)
        if self.finish:
            yield choice("", self.finish)
        if self.usage is not None:
            yield json.dumps({"choices": [], "usage": {"completion_tokens": self.usage}}).encode()
        yield b"[DONE]"


@pytest.fixture
def server() -> Iterator[Streaming]:
    pytest.importorskip("httpx2")
    with Streaming() as made:
        yield made


class TestEndpoint:
    def answer(self, engine: Engine, server: Streaming, **ask: Any) -> Reply:
        peer = parse_peer(f"endpoint:{server.url}/v1")
        with running([peer], Stage(engine, 64)):
            return peer.answer(Ask(**({"ids": [0], "prompt": "ab", "max_tokens": 5} | ask)))

    def test_a_stream_is_timed_and_counted(self, toy, server):
        reply = self.answer(toy, server, temperature=0.5, seed=9, sampling={"top_p": 0.9})
        assert (reply.text, reply.tokens, reply.counted) == ("abcd", 4, "usage")
        assert (reply.finish_reason, list(reply.token_ids)) == ("length", [])
        assert 0.01 <= reply.ttft_s < reply.total_s - 0.02
        (body,) = server.bodies
        assert server.paths == ["/v1/completions"]
        assert (body["model"], body["prompt"], body["max_tokens"]) == ("mine", "ab", 5)
        assert (body["temperature"], body["seed"], body["top_p"]) == (0.5, 9, 0.9)
        assert body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body

    def test_without_usage_pieces_are_counted_and_that_is_told(self, toy, server):
        server.usage = None
        reply = self.answer(toy, server)
        assert (reply.tokens, reply.counted) == (3, "chunks")
        peer = parse_peer(f"endpoint:{server.url}")
        summary = summarize(Run({}, measure(toy, peer)))
        assert any("Pieces of a stream counted" in note for note in notes(summary))
        assert summary.rows[-1].same is None

    def test_a_server_that_refuses_stream_options(self, toy, server):
        server.refuses = ("stream_options",)
        assert self.answer(toy, server).tokens == 4
        server.refuses = ("model",)
        with pytest.raises(EndpointError, match="status 400"):
            self.answer(toy, server)

    def test_messages_where_the_target_has_a_template(self, server):
        words = new_tokenizer()
        words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        engine = Engine(new_module("llama"), words, drafter="none")
        assert self.answer(engine, server).text == "abcd"
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
        self.answer(engine, server, prompt=messages, ignore_eos=True)
        assert server.paths == ["/v1/chat/completions"] * 2
        assert server.bodies[0]["messages"] == [{"role": "user", "content": "ab"}]
        assert server.bodies[1]["messages"] == messages
        assert server.bodies[1]["ignore_eos"] is True

    def test_the_key_is_sent_and_never_told(self, toy, server, monkeypatch):
        monkeypatch.setenv("OUTRIDER_API_KEY", "sesame")
        server.status = 401
        with pytest.raises(EndpointError) as caught:
            self.answer(toy, server)
        assert server.keys == ["Bearer sesame"]
        assert "401" in str(caught.value)
        assert "sesame" not in str(caught.value)

    def test_a_stream_that_breaks_off_is_a_failure(self, toy, server):
        server.finish = None
        with pytest.raises(EndpointError, match="without a finish reason"):
            self.answer(toy, server)

    def test_several_models_have_to_be_named(self, toy, server):
        server.models = ["one", "two"]
        with pytest.raises(UsageError, match=r"lists 2 models.*one, two"):
            self.answer(toy, server)
        peer = parse_peer(f"endpoint:{server.url},model=two")
        with running([peer], Stage(toy, 9)):
            peer.answer(Ask([0], "a", 1))
        assert server.bodies[-1]["model"] == "two"

    def test_nobody_there(self, toy, capsys, tmp_path):
        pytest.importorskip("httpx2")
        words = tmp_path / "words.txt"
        words.write_text("ab\n")
        with pytest.raises(SystemExit) as left:
            main(["bench", "-t", "toy:vocab=4", "--prompts", str(words), "-n", "4",
                  "--peer", "endpoint:http://127.0.0.1:9"])  # fmt: skip
        assert left.value.code == 1
        assert "could not be asked" in capsys.readouterr().err

    def test_from_the_command_line_a_failure_is_counted(self, server, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "160")
        words = tmp_path / "words.txt"
        words.write_text("ab\ncd\n")
        log = tmp_path / "log.jsonl"
        asked = ["-t", "toy:vocab=4", "--prompts", str(words), "-n", "4", "-d", "ngram",
                 "--peer", f"endpoint:{server.url}", "--log", str(log)]  # fmt: skip
        real = Streaming._events

        def second_breaks(self, chat):
            self.finish = None if len(self.bodies) == 3 else "stop"  # the first one warms up
            return real(self, chat)

        monkeypatch.setattr(Streaming, "_events", second_breaks)
        result = CliRunner().invoke(app, asked)
        assert result.exit_code == 0, result.output
        assert "peer, 1 failed" in result.stdout
        assert [r.failure != "" for r in Log(log).records() if r.peer] == [False, True]
        shown = CliRunner().invoke(report, [str(log)])
        assert shown.stdout == result.stdout
