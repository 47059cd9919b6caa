"""The OpenAPI document says what is accepted and answered: no more, no less."""

import json
import re
import shlex
from typing import get_args

import msgspec
import pytest

from services.common.errors import InvalidRequest
from services.gateway.endpoints.examples import ADDRESS, BODIES
from services.gateway.endpoints.field_descriptions import OWN, SHARED
from services.gateway.endpoints.openapi import OPERATIONS, openapi_document
from services.gateway.forms.hints import BY_OBJECT
from services.gateway.forms.json_body import TEXT_END, Parser
from services.gateway.forms.parts import Call, Reasoning, Text
from services.gateway.forms.responses import ChunkWriter, Update
from tests.gateway_fixtures import all_routes

DOCUMENT = openapi_document("1")
# Requests without a struct within.
_FLAT = ("DetokenizeRequest", "UploadRequest", "LoadAdapterRequest", "UnloadAdapterRequest")
SCHEMAS = DOCUMENT["components"]["schemas"]
REQUESTS = sorted({o.request for o in OPERATIONS.values() if o.request}, key=lambda r: r.__name__)


def schema_of(kind):
    return SCHEMAS[kind.__name__]


def unknown_field(kind, name):
    """Whether a body with that field is refused because of the field's name."""
    try:
        Parser(kind)(json.dumps({name: "x"}).encode())
    except InvalidRequest as refused:
        return "unknown field" in refused.message
    return False


def test_document_names_every_route_and_no_other():
    routes = all_routes(None)
    found = {
        (m, r.path.replace(":path", "")) for r in routes for m in (r.methods or set()) - {"HEAD"}
    }
    assert found == OPERATIONS.keys()
    assert {p: set(m) for p, m in DOCUMENT["paths"].items()} == {
        path: {m.lower() for m, other in OPERATIONS if other == path} for _, path in OPERATIONS
    }


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_field_that_is_accepted_is_in_the_document(kind):
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert schema_of(kind)["properties"].keys() == names | BY_OBJECT.get(kind.__name__, {}).keys()
    assert not [name for name in names if unknown_field(kind, name)]
    assert unknown_field(kind, "no_such_field")
    assert schema_of(kind)["additionalProperties"] is False


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_null_means_the_same_as_absence(kind):
    """Of fields that are parsed later (`Raw`) null is a value."""
    seen, left = set(), [kind]
    while left:
        found = left.pop()
        if isinstance(found, type) and issubclass(found, msgspec.Struct) and found not in seen:
            seen.add(found)
            for field in msgspec.structs.fields(found):
                left.append(field.type)
                if not field.required and msgspec.Raw not in get_args(field.type):
                    msgspec.convert(None, field.type)
        left += get_args(found)
    assert len(seen) > 1 or kind.__name__ in _FLAT


def test_each_endpoint_has_an_id_of_its_own():
    operations = [o for methods in DOCUMENT["paths"].values() for o in methods.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names) == len(OPERATIONS)
    assert all(re.fullmatch(r"[a-z][A-Za-z]+", name) for name in names)
    parameters = [p for operation in operations for p in operation.get("parameters", [])]
    assert parameters and all(parameter["description"] for parameter in parameters)


def test_each_field_and_each_object_is_described():
    fields = {(n, f) for n, schema in SCHEMAS.items() for f in schema.get("properties", {})}
    assert len(fields) > 1000
    for name, field in fields:
        text = SCHEMAS[name]["properties"][field]["description"]
        assert re.fullmatch(r"[A-Z`].+\.", text), (name, field, text)
    for name, schema in SCHEMAS.items():
        assert schema["description"].strip(), name
        assert "Attributes:" not in schema["description"]
    # No description of a field that is gone.
    of_objects = {(name, field) for name, texts in OWN.items() for field in texts}
    assert of_objects <= fields
    assert SHARED.keys() <= {field for _, field in fields - of_objects}


def test_references_lead_somewhere():
    text = json.dumps(DOCUMENT)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part[: part.index('"')] in SCHEMAS


def patterns(schema):
    """All patterns of texts in a part of the document."""
    if isinstance(schema, list):
        return [found for each in schema for found in patterns(each)]
    if not isinstance(schema, dict):
        return []
    own = [schema["pattern"]] if isinstance(schema.get("pattern"), str) else []
    return own + [found for each in schema.values() for found in patterns(each)]


def test_patterns_mean_the_same_to_clients_and_to_the_gateway():
    """Python's `$` matches before a line break, its `\\d` takes all scripts' digits, and ECMA's
    expressions have no `\\Z`.
    """
    found = set(patterns(SCHEMAS))
    assert len(found) >= 3
    for pattern in found:
        assert pattern.startswith("^") and pattern.endswith(TEXT_END)
        assert not {r"\d", r"\w", r"\s", r"\Z"} & set(re.findall(r"\\.", pattern))


def test_document_is_valid_for_clients(stack):
    with stack.client() as client:
        served = client.get("/openapi.json").json()
        assert served["openapi"] == "3.1.0"
        assert served["paths"] == json.loads(json.dumps(DOCUMENT["paths"]))


def test_each_endpoint_has_an_example_that_is_accepted():
    with_bodies = {path: o.request for (_, path), o in OPERATIONS.items() if o.request}
    assert BODIES.keys() == with_bodies.keys()
    for path, kind in with_bodies.items():
        for body in BODIES[path].values():
            Parser(kind)(json.dumps(body).encode())
        content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert {n: e["value"] for n, e in content["examples"].items()} == BODIES[path]
    for (method, path), operation in OPERATIONS.items():
        samples = DOCUMENT["paths"][path][method.lower()]["x-codeSamples"]
        assert len(samples) == (len(BODIES[path]) if operation.request else 1)
        for sample in samples:
            words = shlex.split(sample["source"].replace("\\\n", ""))
            assert words[0] == "curl"
            assert sum(word.startswith(ADDRESS) for word in words) == 1
            if operation.request:
                assert json.loads(words[-1]) == BODIES[path][sample["label"]]


# Answers

jsonschema = pytest.importorskip("jsonschema")


def strict(name):
    """The schema of an answer, with no field beyond those it names."""
    closed = {
        key: {**schema, "additionalProperties": False} if "properties" in schema else schema
        for key, schema in SCHEMAS.items()
    }
    return jsonschema.Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": closed}}
    )


def test_chunks_of_thoughts_and_calls_fit_their_schema():
    parts = [Reasoning("I think"), Text("so"), Call(0, "call_1", "f", "{}")]
    event = ChunkWriter("chatcmpl-1", 1, "m", False).update(Update(0, parts, None, None))
    strict("ChatCompletionChunk").validate(json.loads(event[6:]))


def test_answers_fit_their_schemas(stack):
    fields = {"logprobs": True, "top_logprobs": 2, "include_stage_times": True, "n": 2}
    strict("ChatCompletion").validate(stack.chat(**fields).json())
    strict("ChatCompletion").validate(stack.chat(stop=[" red"]).json())
    strict("ErrorAnswer").validate(stack.chat(n=0).json())
    for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True}):
        text = stack.chat(stream=True, stream_options=options, **fields).text
        events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        assert len(events) > 4
        for event in events:
            strict("ChatCompletionChunk").validate(json.loads(event))
    with stack.client() as client:
        strict("ModelList").validate(client.get("/v1/models").json())
        body = {"prompt": "x", "return_token_strs": True}
        strict("TokenizeResponse").validate(client.post("/tokenize", json=body).json())
        strict("DetokenizeResponse").validate(
            client.post("/detokenize", json={"tokens": []}).json()
        )
