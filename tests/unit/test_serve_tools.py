"""Tools and formats of answers: what is asked for, how calls are read, and OpenAI's own client."""

from __future__ import annotations

import json

import openai
import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, Field

from outrider import Engine
from outrider.errors import PromptError
from outrider.models.tokenizer import HFTokenizer, ToyTokenizer
from outrider.models.toy import ToyModel
from outrider.serve.app import Service, create_app
from outrider.serve.limits import Limits
from outrider.serve.orders import Intake
from outrider.serve.schema import ChatRequest
from outrider.serve.tools import Calls, Spelling, spelling_of
from tests.tokenizers_for_tests import new_byte_level

CHAT = "/v1/chat/completions"
HERMES = """
{%- if tools %}<s>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}For each call, return <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call></s>{% endif %}
{%- for m in messages %}
{%- if m.role == "assistant" and m.tool_calls %}<s>assistant
{{ m.content }}{% for call in m.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</s>
{%- elif m.role == "tool" %}<s>user
<tool_response>{{ m.content }}</tool_response></s>
{%- else %}<s>{{ m.role }}
{{ m.content }}</s>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""
LLAMA = """
{%- if tools %}Respond in the format {"name": function name, "parameters": dictionary of arguments}.
{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}{{ m.role }}: {% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}
{%- else %}{{ m.content }}{% endif %}
{% endfor %}assistant: """

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bonn", "Oslo"]},
                "days": {"$ref": "#/$defs/days"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
STRICT = {
    "type": "function",
    "function": {
        "name": "now",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {},
            "required": [],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "hi"}]
HOW = Spelling("<tool_call>", "</tool_call>", "arguments")
BARE = Spelling("", "", "parameters")


def words_of(template: str) -> HFTokenizer:
    made = new_byte_level()
    made.chat_template = template
    return HFTokenizer(made)


def engine_of(words: HFTokenizer) -> Engine:
    return Engine(ToyModel.random(words.vocab_size, seed=1), words, drafter="ngram")


def served(template: str) -> TestClient:
    return TestClient(create_app(Service(engine_of(words_of(template)), "m")))


@pytest.fixture(scope="module")
def hermes():
    with served(HERMES) as made:
        yield made


@pytest.fixture(scope="module")
def llama():
    with served(LLAMA) as made:
        yield made


@pytest.fixture(scope="module")
def client(hermes):
    return openai.OpenAI(
        base_url="http://testserver/v1", api_key="none", http_client=hermes, max_retries=0
    )


def ask(client, **body):
    base = {"model": "m", "messages": MESSAGES, "seed": 1, "max_tokens": 800, "temperature": 0.5}
    return client.post(CHAT, json=base | body)


def chunks(response) -> list[dict]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def checked(call: dict) -> str:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    if name == "now":
        assert arguments == {}
    else:
        assert set(arguments) == {"city", "days"}
        assert arguments["city"] in ("Bonn", "Oslo")
        assert 1 <= arguments["days"] <= 9
    return name


# --- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", ["hermes", "llama"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "now"}), (WEATHER, {"weather"}), (NOW, {"now"})],
    ids=["required", "weather", "now"],
)
def test_a_call_that_must_come_comes(request, served, choice, names):
    client = request.getfixturevalue(served)
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["function"]["name"]}}
    for seed in range(4):
        answer = ask(
            client, tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False, seed=seed
        ).json()
        (made,) = answer["choices"]
        assert made["finish_reason"] == "tool_calls"
        assert made["message"]["content"] is None
        (call,) = made["message"]["tool_calls"]
        assert checked(call) in names


@pytest.mark.parametrize("served", ["hermes", "llama"])
def test_a_stream_tells_the_calls_that_a_whole_answer_has(request, served):
    client = request.getfixturevalue(served)
    how = {"tools": [WEATHER, NOW], "tool_choice": "required", "parallel_tool_calls": False}
    whole = ask(client, **how).json()["choices"][0]
    told = [c["choices"][0] for c in chunks(ask(client, stream=True, **how))]
    assert told[0]["delta"]["role"] == "assistant"
    assert not any(c["delta"].get("content") for c in told)
    (new,) = [call for c in told for call in c["delta"].get("tool_calls", [])]
    assert new["index"] == 0
    assert new["function"] == whole["message"]["tool_calls"][0]["function"]
    assert told[-1]["finish_reason"] == "tool_calls"


def test_what_is_cut_short_is_no_call(hermes):
    how = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 24}
    made = ask(hermes, **how).json()["choices"][0]
    assert made["finish_reason"] == "length"
    assert "tool_calls" not in made["message"]
    assert made["message"]["content"].startswith("<tool_call>")
    told = [c["choices"][0] for c in chunks(ask(hermes, stream=True, **how))]
    text = "".join(c["delta"].get("content") or "" for c in told)
    assert text == made["message"]["content"]


def test_with_auto_an_answer_may_be_text(hermes):
    made = ask(hermes, tools=[WEATHER], max_tokens=20, temperature=0).json()["choices"][0]
    assert made["message"]["content"]
    assert "tool_calls" not in made["message"]
    told = [c["choices"][0] for c in chunks(
        ask(hermes, tools=[WEATHER], max_tokens=20, temperature=0, stream=True)
    )]  # fmt: skip
    text = "".join(c["delta"].get("content") or "" for c in told)
    assert text == made["message"]["content"]


def test_the_model_sees_tools_calls_and_what_came_of_them():
    words = words_of(HERMES)
    intake = Intake(engine_of(words), "m", Limits())
    called = {"name": "weather", "arguments": '{"city": "Bonn", "days": 2}'}
    call = {"id": "call_1", "type": "function", "function": called}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]

    def prompt(**body):
        request = ChatRequest.model_validate({"model": "m", "messages": messages} | body)
        (order,) = intake.orders(request)
        return "".join(words.token_text(i) for i in order.prompt), order

    text, order = prompt(tools=[WEATHER])
    assert '"description": "The weather of a city."' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}' in text
    assert "<tool_response>rain</tool_response>" in text
    assert order.calls is not None
    text, order = prompt(tools=[WEATHER], tool_choice="none")
    assert "The weather of a city." not in text
    assert order.calls is None
    assert "grammar" not in order.options


# --- how calls are spelt and read ----------------------------------------------------------------


def test_the_spelling_is_the_templates():
    assert spelling_of(words_of(HERMES)) == HOW
    assert spelling_of(words_of(LLAMA)) == BARE
    assert spelling_of(words_of("{{ messages[0].content }}")) is None
    assert spelling_of(words_of("{{ tools }}<tool_call><function=f></tool_call>")) is None
    assert spelling_of(ToyTokenizer(4)) is None


def read(calls: Calls, text: str, size: int):
    reader = calls.reader()
    told = []
    for at in range(0, len(text), size):
        reader.push(text[at : at + size], 0)
        told.append(reader.content)
    reader.finish()
    assert all(reader.content.startswith(part) for part in told)
    functions = [call["function"] for call in reader.calls]
    return reader.content, [(f["name"], json.loads(f["arguments"])) for f in functions]


CALLS = Calls(HOW, {"f": {}, "g": {}})
ONE = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call> {"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain <tool", "plain <tool", []),
        (ONE, "", [("f", {"x": "</tool_call> {"})]),
        (f"So: {ONE}\n{TWO}", "So: ", [("f", {"x": "</tool_call> {"}), ("g", {})]),
        (f"a{TWO[:-3]}", f"a{TWO[:-3]}", []),
        (TWO.replace('"g"', '"h"'), TWO.replace('"g"', '"h"'), []),
        (f"{TWO}<tool_call>\n{{", "<tool_call>\n{", [("g", {})]),
    ],
)
def test_calls_are_read_as_they_come(text, content, calls, size):
    assert read(CALLS, text, size) == (content, calls)


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain {", "plain {", []),
        ('{"name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
        ('{"name": "f"', '{"name": "f"', []),
        ('{"name": "h", "parameters": {}}', '{"name": "h", "parameters": {}}', []),
    ],
)
def test_calls_without_marks_are_whole_answers(text, content, calls, size):
    assert read(Calls(BARE, {"f": {}, "g": {}}), text, size) == (content, calls)


def test_marks_may_be_special_tokens():
    calls = Calls(Spelling("<tool_call>", "</tool_call>", "arguments",
                           {7: "<tool_call>", 8: "</tool_call>"}), {"g": {}})  # fmt: skip
    reader = calls.reader()
    for text, token in (("hm", 1), ("", 7), ('\n{"name": "g", "arguments": {}}\n', 2), ("", 8)):
        reader.push(text, token)
    reader.finish()
    assert (reader.content, len(reader.calls)) == ("hm", 1)
    assert "head: TEXT <tool_call>" in calls.grammar().source


# --- formats -------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_schema_is_kept_to(hermes, strict):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": strict}}
    for drafter in ("none", "ngram"):
        body = {"response_format": form, "speculation": {"drafter": drafter}}
        made = ask(hermes, **body).json()["choices"][0]
        assert made["finish_reason"] == "stop"
        answer = json.loads(made["message"]["content"])
        assert isinstance(answer["ok"], bool)
        assert answer["n"] in (1, 2)


def test_text_is_no_constraint(hermes):
    plain = ask(hermes, max_tokens=8).json()["choices"][0]["message"]
    asked = ask(hermes, max_tokens=8, response_format={"type": "text"})
    assert asked.json()["choices"][0]["message"] == plain


def test_any_json_object_begins_as_one(hermes):
    made = ask(hermes, max_tokens=8, response_format={"type": "json_object"}).json()["choices"][0]
    assert made["message"]["content"].startswith("{")


# --- what is refused ------------------------------------------------------------------------------


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"tools": [WEATHER, WEATHER]}, "invalid_value", "same name"),
        ({"tools": [WEATHER] * 129}, "limit_exceeded", "128"),
        ({"tools": [named("a b")]}, "invalid_value", "name"),
        ({"tools": [WEATHER], "tool_choice": named("other")}, "invalid_value", "no tool 'other'"),
        ({"tool_choice": "auto"}, "invalid_value", "'tool_choice' needs 'tools'"),
        ({"parallel_tool_calls": True}, "invalid_value", "'parallel_tool_calls' needs 'tools'"),
        (
            {"tools": [WEATHER], "response_format": {"type": "json_object"}},
            "unsupported_parameter",
            "together",
        ),
        (
            {"tools": [{"type": "function", "function": {
                "name": "f", "parameters": {"type": "x"}}}]},
            "invalid_value",
            "Invalid type: x",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "a", "schema": {"not": {}}}}},
            "invalid_value",
            "Unimplemented keys",
        ),
        (
            {"response_format": {"type": "json_object"}, "min_tokens": 3},
            "invalid_value",
            "min_tokens",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "tool_call_id"),
        ({"messages": [{"role": "assistant", "content": None}]}, "invalid_value", "content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "["}}]}]},
            "invalid_value",
            "messages",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(hermes, body, code, says):
    answer = ask(hermes, **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code
    assert says in answer.json()["error"]["message"]


def test_a_model_that_knows_no_tools_says_so():
    with served("{% for m in messages %}{{ m.content }}{% endfor %}") as client:
        answer = ask(client, tools=[WEATHER])
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert "names no tools" in answer.json()["error"]["message"]
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        answer = ask(client, messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
        assert answer.status_code == 400
        assert "tool_calls" in answer.json()["error"]["message"]
    with pytest.raises(PromptError, match="tools"):
        words_of("{{ messages[0].content }}").encode_messages(MESSAGES, [WEATHER])


# --- OpenAI's own client --------------------------------------------------------------------------


class Pet(BaseModel):
    age: int = Field(ge=0, le=9)
    good: bool


def test_its_parse_gives_a_pydantic_object(client):
    made = client.chat.completions.parse(
        model="m", messages=MESSAGES, response_format=Pet, max_tokens=800, seed=2
    )
    assert isinstance(made.choices[0].message.parsed, Pet)


def test_it_calls_tools_and_sends_what_came_of_them(client):
    tools = [WEATHER, NOW]
    made = client.chat.completions.create(
        model="m", messages=MESSAGES, tools=tools, tool_choice="required", seed=3, max_tokens=800,
        parallel_tool_calls=False,
    )  # fmt: skip
    message = made.choices[0].message
    (call,) = message.tool_calls
    checked(call.model_dump())
    again = client.chat.completions.create(
        model="m", tools=tools, max_tokens=5,
        messages=[*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}],
    )  # fmt: skip
    assert again.choices[0].finish_reason in ("stop", "length")


def test_its_stream_helper_gathers_the_calls(client):
    with client.chat.completions.stream(
        model="m", messages=MESSAGES, tools=[STRICT], tool_choice="required", seed=3,
        max_tokens=800, parallel_tool_calls=False,
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        made = stream.get_final_completion()
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.tool_calls[0].function.name == "now"
