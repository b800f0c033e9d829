"""The OpenAPI document, and a live server's answers held against it by schemathesis."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hispec_ray.config import Settings
from hispec_ray.serving.coordinator import Coordinator
from hispec_ray.serving.ingress import create_app
from hispec_ray.serving.keys import Keys
from serving.asgi import LIMIT, MODEL, send
from serving.fake_engine import FakeEngine

OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
    ("GET", "/health"),
]
ONCE = [Phase.generate]
BODIES = [operation for operation in OPERATIONS if operation[0] == "POST"]


def document(keys: Keys | None = None) -> Any:
    written = create_app(Coordinator(Settings(), load=lambda settings: FakeEngine()), MODEL, LIMIT, keys)
    headers = {"Authorization": "Bearer one"} if keys else None
    response = send("GET", "/openapi.json", over=written, headers=headers)
    assert response.status_code == 200
    return response.json()


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {value["$ref"]} if isinstance(value.get("$ref"), str) else set().union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_openapi_document_has_the_bodies() -> None:
    written = document()
    for path, name in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        schema = written["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert "temperature" in written["components"]["schemas"][name]["properties"]
        assert written["components"]["schemas"][name]["properties"]["model"]["enum"] == [MODEL]
    for reference in references(written):
        place = written
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_the_openapi_document_has_the_answers_and_the_errors() -> None:
    written = document()
    operations = {path: operation for path, methods in written["paths"].items() for operation in methods.values()}
    for path, operation in operations.items():
        answers = operation["responses"]
        assert answers["200"]["content"]["application/json"]["schema"]["$ref"].startswith("#/components/schemas/")
        assert ("text/event-stream" in answers["200"]["content"]) == path.endswith("/completions")
        assert {"200", "401", "404", "405", "500"} <= answers.keys()
        assert all(answer == {"$ref": f"#/components/responses/{status}"} for status, answer in answers.items() if status != "200")
    assert {"400", "413", "429", "503"} < operations["/v1/completions"]["responses"].keys()
    for answer in written["components"]["responses"].values():
        assert answer["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorBody"}


def test_the_openapi_document_says_where_a_key_is_needed() -> None:
    guarded, open_to_all = document(Keys(["one"])), document()
    assert guarded["security"] == [{"key": []}]
    assert [path for path, methods in guarded["paths"].items() if methods.get("get", {}).get("security") == []] == ["/health"]
    assert "security" not in open_to_all


@pytest.fixture(scope="module")
def api(server: str) -> Any:
    return importlib.import_module("schemathesis").openapi.from_url(f"{server}/openapi.json")


RULES = (
    # of several fields
    "stream_options is set and stream is not true", "include_usage is not; it is for streams with usage only",
    "min_tokens is .*; it must be from 0 to max_tokens", "best_of is .* only where it equals n", "they are two names of one limit",
    "it is for log-probabilities only", "there are no tools", "tools has several functions of one name", "tool_choice names",
    "response_format is set beside tools", "where a grammar says how the answer ends", "it belongs to the type json_schema",
    "schema is required", "set one of them$", "content is null; it must be", "only messages of the role assistant have calls",
    "messages of the role tool have one, and no others",
    # of the model and of this server
    "ids must be from 0 to", "maximum context length", "sequences; at most .* may wait at once", "the prompt is empty", "this server has '",
    "chat template refuses these messages", "chat template knows no tools",
    # of what a schema of JSON cannot say
    "the (grammar|schema) cannot be followed", "half of a surrogate pair", "nested more than", "whose arguments are",
    r"is -?[\d.e+]+; it must be a valid integer",  # to a schema 2.0 is one
)  # fmt: skip
"""For these alone a body may be refused that the document allows."""


def conforms(case: Any, *more: Any) -> Any:
    """Send a case, and hold the answer against the document; return the answer."""
    checks = importlib.import_module("schemathesis.specs.openapi.checks")
    if isinstance(case.body, dict) and case.path.startswith("/v1/"):  # long answers say no more than short ones
        fewer = {name: 2 for name in ("n", "best_of") if isinstance(case.body.get(name), int) and case.body[name] > 2}
        case.body = case.body | fewer | ({} if case.body.get("max_tokens") in range(4) else {"max_tokens": 4})
    answer = case.call(timeout=120)
    held = (
        importlib.import_module("schemathesis.checks").not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
        *more,
    )
    case.validate_response(answer, checks=list(held))
    return answer


def few(examples: int) -> Any:
    """The same few examples each time."""
    quiet = list(HealthCheck)
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, phases=ONCE, suppress_health_check=quiet)


def examples(api: Any, path: str) -> list[dict[str, Any]]:
    content = api.raw_schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return [example["value"] for example in content["examples"].values()]


def test_the_document_has_every_operation(api: Any) -> None:
    paths = api.raw_schema["paths"]
    assert {(method.upper(), path) for path, operations in paths.items() for method in operations} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_the_documents_examples_are_answered_as_it_says(api: Any, method: str, path: str) -> None:
    for body in examples(api, path):
        assert conforms(api[path][method].Case(body=body)).status_code == 200


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_the_document_allows_is_answered_as_it_says(api: Any, method: str, path: str) -> None:
    """About half of the drawn bodies are sent as they are; of the others a field or two, beside an example: those reach the engine."""
    found = set()

    @few(20)
    @given(case=api[path][method].as_strategy(), data=st.data())
    def run(case: Any, data: Any) -> None:
        if method == "POST" and data.draw(st.booleans()):
            names = data.draw(st.sets(st.sampled_from(sorted(case.body.keys() - {"prompt", "messages", "tokens"})), max_size=2))
            body = data.draw(st.sampled_from(examples(api, path)))
            case = api[path][method].Case(body=body | {name: case.body[name] for name in names})
        answer = conforms(case)
        found.add(answer.status_code)
        message = "" if answer.status_code == 200 else answer.json()["error"]["message"]
        assert answer.status_code == 200 or any(re.search(rule, message) for rule in RULES), message

    run()
    assert 200 in found


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_whatever_the_document_forbids_is_refused_as_it_says(api: Any, method: str, path: str) -> None:
    schemathesis = importlib.import_module("schemathesis")
    rejected = importlib.import_module("schemathesis.specs.openapi.checks").negative_data_rejection

    @few(10)
    @given(case=api[path][method].as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def run(case: Any) -> None:
        assert 400 <= conforms(case, rejected).status_code < 500

    run()
