"""The API against its own description: whatever is sent, an answer is one that is described."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import Engine
from outrider.models.tokenizer import HFTokenizer
from outrider.models.toy import ToyModel
from outrider.serve.app import Service, create_app
from outrider.serve.limits import Limits
from tests.tokenizers_for_tests import new_byte_level

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import openapi
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

EXAMPLES = 60
"""For each path; the same ones in every run."""

GENERATES = ("/v1/chat/completions", "/v1/completions")
PATHS = (*GENERATES, "/v1/models", "/v1/models/{name}", "/health", "/ready", "/metrics", "/")
NAME = "m"


@pytest.fixture
def service():
    """A toy that reads any text, with a chat template: what is fuzzed is the server."""
    words = new_byte_level()
    engine = Engine(ToyModel.random(len(words), 1), HFTokenizer(words), drafter="ngram")
    limits = Limits(max_tokens=8, body_bytes=20_000, sequences=4, messages=8)
    made = Service(engine, NAME, limits=limits, cache_bytes=10**9)
    yield made  # it is started with the app, at the first request
    assert made.scheduler.idle
    assert made.scheduler.failure is None
    made.scheduler.stop()


def of_our_model(context: Any, body: Any) -> Any:
    """Bodies name the model, or none would come further than that."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = NAME
    return body


@pytest.fixture
def api(service):
    made = openapi.from_asgi("/openapi.json", create_app(service))
    made.hook("map_body")(of_our_model)
    return made


def _within_limits(body: dict[str, Any]) -> dict[str, Any]:
    """Every other body without most of what is optional: values that are described may be too
    large, and too many at once are refused for one of them."""
    if len(body) % 2:
        return body
    few = ("model", "messages", "prompt", "stream", "user", "ignore_eos")
    kept = {name: body[name] for name in few if name in body}
    if "messages" in kept:  # which have rules that no schema tells
        said = [str(message.get("content"))[:50] for message in kept["messages"][:8]]
        kept["messages"] = [{"role": "user", "content": text} for text in said]
    return kept


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", PATHS)
def test_every_answer_is_as_described(service, api, path, mode):
    method = "POST" if path in GENERATES else "GET"
    operation = api[path][method]
    described = operation.definition.raw["responses"]

    @settings(
        max_examples=EXAMPLES if path in GENERATES else 5,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = _within_limits(case.body)
        # What is refused beyond the description are limits, and names of models and drafters.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        assert response.status_code < 500
        assert str(response.status_code) in described, response.content

    try:
        check()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # nothing can be wrong where nothing is asked for
    if path in GENERATES:  # else the above might have seen refusals alone, or none
        labels = {"path": path, "status": "200" if mode is GenerationMode.POSITIVE else "400"}
        count = service.metrics.registry.get_sample_value("outrider_requests_total", labels)
        assert (count or 0) >= 3
