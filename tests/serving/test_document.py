"""The OpenAPI document of a live server, and the answers held against it by schemathesis."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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


@pytest.fixture(scope="module")
def api(server: str) -> Any:
    return importlib.import_module("schemathesis").openapi.from_url(f"{server}/openapi.json")


def conforms(case: Any, *more: Any) -> int:
    """Send a case, and hold the answer against the document; return its status."""
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
    return int(answer.status_code)


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
        assert conforms(api[path][method].Case(body=body)) == 200


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
        found.add(conforms(case))

    run()
    assert 200 in found


@pytest.mark.parametrize(("method", "path"), BODIES)
def test_whatever_the_document_forbids_is_refused_as_it_says(api: Any, method: str, path: str) -> None:
    schemathesis = importlib.import_module("schemathesis")
    rejected = importlib.import_module("schemathesis.specs.openapi.checks").negative_data_rejection

    @few(10)
    @given(case=api[path][method].as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    def run(case: Any) -> None:
        assert 400 <= conforms(case, rejected) < 500

    run()
