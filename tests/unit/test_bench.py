"""The measurement itself, on a toy: turns, fairness, the same tokens, entropies, memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from outrider import Engine
from outrider.engine import generation
from outrider.engine.prompts import PromptRecord
from outrider.errors import NumericalError, PromptError, TokenizerMismatchError, UsageError
from outrider.lab.bench import Bench
from outrider.lab.configuration import Configuration
from outrider.lab.entropy import token_entropies
from outrider.lab.memory import cache_bytes, peak_bytes, tensor_bytes
from outrider.lab.provenance import commit, cpu_name, machine, software
from outrider.lab.record import Record
from outrider.models.hf import HFModel
from outrider.models.toy import ToyModel
from tests.small_models import new_module

PROMPTS = [PromptRecord(str(i), kind, text) for i, (kind, text) in enumerate(
    [("repeat", "abab"), ("repeat", "cdcdcd"), ("other", "dcba"), ("other", "aabc")]
)]  # fmt: skip
THREE = [Configuration("ngram"), Configuration("ngram", "rejection"), Configuration("none")]


@pytest.fixture
def engine() -> Engine:
    return Engine.load("toy:vocab=4,seed=1", drafter="none")


def bench(engine: Engine, **options) -> Bench:
    return Bench(engine, PROMPTS, THREE, **({"max_tokens": 12} | options))


class TestTurns:
    def test_every_turn_has_every_configuration_once(self, engine):
        made = bench(engine, repeats=3, temperatures=(0.0, 0.7))
        turns = list(made.turns())
        assert len(turns) == 3 * 4 * 2
        labels = sorted(c.label for c in made.configurations)
        assert all(sorted(c.label for c in turn.order) == labels for turn in turns)
        assert len({(t.repeat, t.prompt, t.temperature) for t in turns}) == len(turns)
        assert made.total == 4 * len(turns)

    def test_all_of_a_prompt_come_before_the_next(self, engine):
        order = [(r.repeat, r.prompt) for r in bench(engine, repeats=2).run()]
        assert order == sorted(order)
        assert list(Counter(order).values()) == [4] * 8

    @pytest.mark.parametrize("batch", [1, 2])
    def test_configurations_alternate_within_a_prompt(self, engine, batch, monkeypatch):
        """A round of each, for as long as both have any to come; by prompt, one after the other."""

        def played(turns):
            rounds: list[int] = []
            real = generation.Generation.settle

            def settle(self, *arguments):
                rounds.append(id(self))
                return real(self, *arguments)

            monkeypatch.setattr(generation.Generation, "settle", settle)
            two = [Configuration("none", label="other")]
            made = Bench(
                engine, PROMPTS[:batch], two, max_tokens=6, batches=(batch,), turns=turns,
                ignore_eos=True,
            )  # fmt: skip
            texts = {(r.configuration, r.prompt): r.token_ids for r in made.run()}
            monkeypatch.setattr(generation.Generation, "settle", real)
            who = [list(dict.fromkeys(rounds)).index(one) // batch for one in rounds]
            return who, texts

        by_token, texts = played("token")
        by_prompt, same = played("prompt")
        assert by_token == ([0] * batch + [1] * batch) * 6
        assert by_prompt == [0] * batch * 6 + [1] * batch * 6
        assert texts == same

    def test_the_order_is_shuffled_and_the_seeds_alone(self, engine):
        def orders(seed):
            made = bench(engine, repeats=20, seed=seed)
            return [[c.label for c in turn.order] for turn in made.turns()]

        first = Counter(order[0] for order in orders(1))
        assert set(first) == {"plain", "ngram", "ngram,rule=rejection", "none"}
        assert min(first.values()) >= 8  # of 80 turns, 20 expected: a chance of 1e-3 for any
        assert orders(1) == orders(1)
        assert orders(1) != orders(2)

    def test_what_is_done_is_left_out(self, engine):
        every = list(bench(engine).run())
        done = {r.key for r in every[:5]}
        rest = list(bench(engine).run(done))
        assert [r.key for r in rest] == [r.key for r in every[5:]]
        assert [r.token_ids for r in rest] == [r.token_ids for r in every[5:]]
        assert list(bench(engine).run({r.key for r in every})) == []

    def test_another_adapter_is_not_done(self, engine):
        done = {r.key for r in bench(engine).run()}
        assert len(list(bench(engine, adapter="mine").run(done))) == len(done)


class TestBatches:
    def test_every_prompt_is_recorded_once_at_each_size(self, engine):
        made = list(bench(engine, batches=(1, 3), temperatures=(0.0, 1.0), repeats=2).run())
        assert (
            len(made)
            == len({r.key for r in made})
            == bench(engine, batches=(1, 3), temperatures=(0.0, 1.0), repeats=2).total
        )
        sizes = Counter(r.batch for r in made)
        assert sizes[1] == sizes[3] == len(made) // 2

    def test_outputs_are_the_same_side_by_side(self, engine):
        made = list(bench(engine, batches=(1, 4), temperatures=(1.0,)).run())
        alone = {(r.configuration, r.prompt): r.token_ids for r in made if r.batch == 1}
        for one in made:
            assert one.token_ids == alone[one.configuration, one.prompt]
            assert "".join(one.pieces)
            assert sum(r.emitted for r in one.rounds) == len(one.token_ids)

    def test_a_batch_that_was_broken_off_is_done_again(self, engine):
        every = list(bench(engine, batches=(2,)).run())
        done = {r.key for r in every[:3]}  # one batch whole, half of the next
        rest = list(bench(engine, batches=(2,)).run(done))
        assert [r.key for r in rest] == [r.key for r in every[3:]]

    def test_what_goes_wrong_in_a_batch_is_raised(self, engine, monkeypatch):
        score = engine.model.score

        def spoiled(cache, tokens, proposal):
            rows = score(cache, tokens, proposal)
            return rows * torch.nan if cache.length > 9 else rows

        monkeypatch.setattr(engine.model, "score", spoiled)
        with pytest.raises(NumericalError):
            list(bench(engine, batches=(4,)).run())


class TestRecords:
    def test_they_hold_the_generation(self, engine):
        made = {r.configuration: r for r in bench(engine).run() if r.prompt == 1}
        ours, plain = made["ngram"], made["plain"]
        assert (ours.kind, ours.prompt_tokens, ours.repeat, ours.batch) == ("repeat", 6, 0, 1)
        assert (ours.drafter, ours.rule, plain.drafter) == ("ngram", "greedy", "none")
        expected = engine.generate("cdcdcd", max_tokens=12, plain=True)
        assert ours.token_ids == plain.token_ids == expected.token_ids
        assert "".join(ours.pieces) == expected.text
        assert ours.total_s >= ours.ttft_s > 0
        assert sum(r.emitted for r in ours.rounds) == len(ours.origins) == 12
        assert set(plain.origins) == {"p"}
        assert set(ours.origins) & set("acb")
        assert {r.order for r in made.values()} == {0, 1, 2, 3}

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_coupled_outputs_are_plain_decodings(self, engine, temperature):
        made = list(bench(engine, temperatures=(temperature,), repeats=2).run())
        plain = {(r.prompt, r.repeat): r for r in made if r.configuration == "plain"}
        for one in made:
            base = plain[one.prompt, one.repeat]
            assert one.seed == base.seed == one.prompt
            if one.configuration in ("ngram", "none") or temperature == 0:
                assert one.token_ids == base.token_ids

    def test_a_repeat_does_the_same_work(self, engine):
        made = list(bench(engine, temperatures=(1.0,), repeats=2).run())
        by_key = {(r.configuration, r.prompt, r.repeat): r.token_ids for r in made}
        for (label, prompt, repeat), tokens in by_key.items():
            assert tokens == by_key[label, prompt, 1 - repeat]

    def test_requests_reach_the_engine(self, engine):
        bias = {"logit_bias": {2: 1000.0}}
        made = list(bench(engine, sampling=bias, temperatures=(1.0,), max_tokens=5).run())
        assert all(r.token_ids == [2] * 5 for r in made)

    def test_warming_up_finds_what_cannot_run(self, engine):
        bench(engine).warm_up()
        broken = Bench(
            engine, PROMPTS, [Configuration("ngram"), Configuration("model:toy:vocab=9")]
        )
        with pytest.raises(TokenizerMismatchError, match="vocab=9"):
            broken.warm_up()

    def test_a_chat_template_is_used_where_there_is_one(self, engine, monkeypatch):
        asked = []
        monkeypatch.setattr(type(engine.tokenizer), "has_chat_template", True)
        monkeypatch.setattr(
            type(engine.tokenizer),
            "encode_messages",
            lambda self, messages, tools=(): asked.append(messages) or [0, 1],
            raising=False,
        )
        assert bench(engine).ids == [[0, 1]] * 4
        assert asked[0] == [{"role": "user", "content": "abab"}]


class TestRefused:
    def test_a_prompt_that_leaves_no_room_is_named(self):
        engine = Engine.load("toy:vocab=4,context=5", drafter="none")
        with pytest.raises(PromptError, match="Prompt '1' has 6 tokens"):
            bench(engine)

    def test_a_prompt_of_other_letters_is_named(self, engine):
        with pytest.raises(PromptError, match=r"Prompt 'one'.*'x'"):
            Bench(engine, [PromptRecord("one", "x", "xyz")], THREE)

    @pytest.mark.parametrize(
        "options", [{"repeats": 0}, {"temperatures": ()}, {"batches": ()}, {"batches": (0,)}]
    )
    def test_options(self, engine, options):
        with pytest.raises(UsageError):
            bench(engine, **options)

    def test_two_of_one_name(self, engine):
        with pytest.raises(UsageError, match="'ngram'"):
            Bench(engine, PROMPTS, [THREE[0], THREE[0]])


class TestEntropies:
    def test_by_hand(self):
        laws = {0: [0.5, 0.25, 0.25], 1: [1.0, 0.0, 0.0], 2: [0.1, 0.1, 0.8]}
        with np.errstate(divide="ignore"):
            model = ToyModel(lambda tokens: np.array(laws[tokens[-1]]), 3)
            found = token_entropies(model, [2, 0], [1, 0, 2])
        first = 0.5 * np.log(2) + 0.5 * np.log(4)
        assert found == pytest.approx([first, 0.0, first], abs=1e-9)

    @pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
    def test_blocks_change_nothing(self, length):
        model = ToyModel.random(4, seed=3, order=3)
        tokens = [int(t) for t in np.random.default_rng(length).integers(0, 4, 5 + length)]
        prompt, output = tokens[:5], tokens[5:]
        expected = []
        for i in range(length):
            p = model.next((*prompt, *output[:i]))
            expected.append(float(-(p * np.log(p)).sum()))
        assert token_entropies(model, prompt, output) == pytest.approx(expected)
        used = model.new_cache(len(tokens))
        model.prefill(used, tokens[:-1], None)
        assert token_entropies(model, prompt, output, used) == pytest.approx(expected)
        model.rollback = "snapshot"
        assert token_entropies(model, prompt, output) == pytest.approx(expected)

    def test_they_come_with_every_record(self, engine):
        for one in bench(engine, temperatures=(1.0,)).run():
            expected = token_entropies(
                engine.model, engine.encode(PROMPTS[one.prompt].prompt), one.token_ids
            )
            assert one.entropies == pytest.approx(expected, abs=1e-4)

    def test_they_can_be_left_out(self, engine):
        assert all(r.entropies == [] for r in bench(engine, entropies=False).run())


@pytest.mark.usefixtures("one_thread")
class TestMemory:
    def test_what_is_shared_counts_once(self):
        one = torch.zeros(10)
        assert tensor_bytes({"a": one, "b": one[2:4], "c": [one]}) == 40
        assert tensor_bytes([one, torch.zeros(3)], beside=one) == 12
        assert tensor_bytes(np.zeros(4)[1:3]) == 32
        assert tensor_bytes(torch.empty(5, device="meta")) is None

    def test_a_models_weights_and_cache(self):
        module = new_module("llama")
        model = HFModel(module)
        unique = {p.data_ptr(): p.nbytes for p in [*module.parameters(), *module.buffers()]}
        assert tensor_bytes(model) == sum(unique.values())
        cache = model.new_cache(20)
        model.prefill(cache, [1, 2, 3, 4], None)
        config = module.config
        width = config.hidden_size // config.num_attention_heads
        least = 2 * config.num_hidden_layers * config.num_key_value_heads * width * 4 * 4
        assert least <= cache_bytes(cache) == tensor_bytes(cache, beside=model)

    def test_a_draft_model_beside_its_target(self):
        target, draft = HFModel(new_module("llama")), HFModel(new_module("llama"))
        from outrider.drafters.model import ModelDrafter

        assert tensor_bytes(ModelDrafter(draft), beside=target) == tensor_bytes(draft)
        assert tensor_bytes(ModelDrafter(target), beside=target) is None

    def test_unknown_is_none(self, engine):
        assert cache_bytes(engine.model.new_cache(5)) is None
        about = bench(engine).about()
        assert about["draft_bytes"]["ngram"] is None
        assert about["fingerprint"] is None

    def test_the_most_in_use_is_more_than_python_alone(self):
        peak = peak_bytes("cpu")
        assert peak is not None
        assert 20e6 < peak < 1e12


class TestProvenance:
    def test_versions_and_machine(self):
        told = software() | machine()
        assert told["torch"].startswith(torch.__version__.split("+")[0])
        assert told["threads"] == torch.get_num_threads()
        assert told["cpu"] == cpu_name()
        assert told["memory_bytes"] > 1e8

    def test_code_outside_a_repository_has_no_state(self, tmp_path):
        assert commit(tmp_path) is None


def test_records_are_what_the_log_takes(engine):
    for one in bench(engine).run():
        assert Record.from_dict(one.to_dict()) == one
