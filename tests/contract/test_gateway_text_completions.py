"""POST /v1/completions, by the official client, and token ids in answers."""

import json
import time

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer

from services.gateway.forms.text_completions import parse_completion_request
from tests.gateway_stack import MODEL, GatewayStack
from tests.noise import least
from tests.piece_tokenizers import definition
from tests.tiny_tokenizer import added_ids, tokenizer_json_with_bos


@pytest.fixture
def client(stack):
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def post(stack, **fields):
    with stack.client() as client:
        return client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", **fields})


def prompt_ids(submit) -> list[int]:
    return np.frombuffer(submit.prompt_token_ids, "<i4").tolist()


def test_answer(client, stack):
    answer = client.completions.create(model=MODEL, prompt="hello", seed=1, user="me")
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("A red circle.", "stop", None)
    (submit,) = stack.decoder.submits
    assert prompt_ids(submit) == stack.tokenizer.encode_text("hello")
    assert submit.sampling.max_tokens == 16
    assert answer.usage.prompt_tokens == len(prompt_ids(submit))
    assert answer.usage.completion_tokens == 5


def test_prompt_is_the_whole_input(stack):
    """As in transformers: names of special tokens are these tokens."""
    post(stack, prompt="<|im_start|>user\nhi<|im_end|>")
    added = added_ids()
    found = prompt_ids(stack.decoder.submits[0])
    assert (found[0], found[-1]) == (added["<|im_start|>"], added["<|im_end|>"])
    assert found[1:-1] == stack.tokenizer.encode_text("user\nhi")


def test_prompt_is_what_transformers_makes_of_it(stack):
    transformers = pytest.importorskip("transformers")
    file = stack.model_directory / "tokenizer.json"
    hf = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    for text in ("hello", " <tool_call> a</tool_call>\n", "中文 <|im_end|><think>"):
        assert stack.tokenizer.encode_prompt(text, True) == hf(text)["input_ids"]


def test_many_prompts_and_choices(client, stack):
    ids = stack.tokenizer.encode_text("two words")
    answer = client.completions.create(model=MODEL, prompt=["hello", "two words"], n=2, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {"A red circle."}
    submits = stack.decoder.submits
    assert sorted(submit.sampling.seed for submit in submits) == [5, 5, 6, 6]
    assert sum(prompt_ids(submit) == ids for submit in submits) == 2
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(ids) + len(stack.tokenizer.encode_text("hello"))


@pytest.mark.parametrize("nested", [False, True])
def test_token_ids_are_prompts(stack, nested):
    assert post(stack, prompt=[[5, 6, 7]] if nested else [5, 6, 7]).status_code == 200
    assert prompt_ids(stack.decoder.submits[0]) == [5, 6, 7]


@pytest.mark.parametrize("echo", [False, True])
def test_stream_equals_the_whole_answer(client, echo):
    fields = dict(model=MODEL, prompt=["hello", "hi"], n=2, echo=echo, logprobs=None)
    whole = client.completions.create(**fields)
    texts, reasons = [""] * 4, [None] * 4
    chunks = list(
        client.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
    )
    for chunk in chunks:
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] == ("hello" if echo else "") + "A red circle."
    assert reasons == ["stop"] * 4
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_logprobs(client):
    found = client.completions.create(model=MODEL, prompt="hello", logprobs=2).choices[0]
    assert "".join(found.logprobs.tokens) == found.text == "A red circle."
    assert found.logprobs.token_logprobs == [-0.5] * 4
    tops = found.logprobs.top_logprobs
    assert all(token in top for token, top in zip(found.logprobs.tokens, tops, strict=True))
    assert [found.text[o:].startswith(t) for o, t in zip(
        found.logprobs.text_offset, found.logprobs.tokens, strict=True)] == [True] * 4  # fmt: skip


def test_echo_alone(stack):
    choice = post(stack, echo=True, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert stack.decoder.submits[0].sampling.max_tokens == 1


@pytest.mark.parametrize("n", [1, 2])
def test_an_echo_alone_has_no_completion_tokens(stack, n):
    """The token that is made and thrown away is not the client's, whatever it is."""
    fields = {"echo": True, "max_tokens": 0, "n": n, "logprobs": 0 if n == 1 else None}
    stopping = {"stop_token_ids": stack.decoder.reply[:1], "return_token_ids": True}
    whole = post(stack, **fields, **stopping).json()
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"]
    for choice in whole["choices"]:
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
        assert (choice["text"], choice["token_ids"]) == ("hello", [])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last = post(stack, **fields, **options).text.split("\n\n")[-3]
    assert json.loads(last.removeprefix("data: "))["usage"] == whole["usage"]


def test_stop(stack):
    choice = post(stack, stop=[" circle"]).json()["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("A red", " circle")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": [1, 1 << 20]}, "prompt[1]"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": ["x"] * 128, "n": 2}, "n"),
        ({"prompt": "<|image_pad|>"}, "prompt"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [1]}, "messages"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"tools": [1]}, "tools"),
    ],
)
def test_refused_by_name(stack, fields, param):
    response = post(stack, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not stack.decoder.submits


def test_other_model_and_failure_in_mid_stream(client, stack):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    stack.decoder.fail_after = (2, "internal_error")
    text = ""
    with pytest.raises(openai.APIError):
        for chunk in client.completions.create(model=MODEL, prompt=["x", "y"], stream=True):
            text += chunk.choices[0].text
    assert text
    stack.wait(lambda: not stack.decoder.running)


# The prompt's own logprobs

PROMPT = "hello two words"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(client, stack, stream):
    ids = stack.tokenizer.encode_text(PROMPT)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, echo=True, logprobs=2, max_tokens=2, stream=stream
    )
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    found = [value for choice in choices for value in choice.logprobs.token_logprobs]
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    assert text == "".join(tokens) == PROMPT + "A red"
    assert found == [None, *(-float(i) for i in range(1, len(ids))), -0.5, -0.5]
    assert all(text[o:].startswith(t) for o, t in zip(offsets, tokens, strict=True))
    assert tops[0] is None and all(t in top for t, top in zip(tokens[1:], tops[1:], strict=True))
    assert stack.decoder.submits[0].sampling.prompt_logprobs == 2


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text(client, stack, stream, as_ids):
    """Where characters have several tokens, where special tokens are skipped, and by ids."""
    skipped = added_ids()["<|im_end|>"]
    prompt, encode = "a 🙂 é", stack.tokenizer.encode_text
    stack.decoder.reply = [*encode("中x"), skipped, *encode("yz"), *encode("🙂!")]
    answer = client.completions.create(
        model=MODEL, prompt=prompt, echo=True, logprobs=0, max_tokens=100, stream=stream,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": as_ids},
    )  # fmt: skip
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    text = "".join(choice.text for choice in choices)
    assert text == prompt + "中xyz🙂!"
    offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
    ids = [*encode(prompt), *stack.decoder.reply]
    assert len(offsets) == len(ids) > len(text) + 1
    for at, (offset, token) in enumerate(zip(offsets, ids, strict=True)):
        data = b"".join(map(stack.tokenizer.token_bytes, [t for t in ids[:at] if t != skipped]))
        assert offset == len(data.decode(errors="ignore")), token


@pytest.fixture(scope="module")
def bos_stack(loop_thread, tmp_path_factory):
    """A gateway whose tokenizer puts a token before each prompt."""
    files = {"tokenizer.json": tokenizer_json_with_bos("<|im_start|>")}
    stack = GatewayStack(loop_thread, tmp_path_factory.mktemp("bos"), files=files)
    yield stack
    stack.close()


def test_a_bos_before_the_prompt_has_no_place_in_its_text(bos_stack):
    choice = post(bos_stack, echo=True, logprobs=0, max_tokens=1, prompt="abc").json()["choices"][0]
    logprobs = choice["logprobs"]
    places = zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
    assert [*places] == [("<|im_start|>", 0), ("a", 0), ("b", 1), ("c", 2), ("A", 3)]
    assert choice["text"] == "abcA"


@pytest.fixture(scope="module", params=["llama2", "mistral"])
def piece_stack(request, loop_thread, tmp_path_factory):
    """A gateway whose tokenizer puts a BOS and a space before each prompt."""
    files = {"tokenizer.json": json.dumps(definition(request.param, ("[INST]", "[/INST]")))}
    stack = GatewayStack(
        loop_thread, tmp_path_factory.mktemp(request.param), text_only=True, num_encoders=0,
        files=files,
    )  # fmt: skip
    yield stack
    stack.close()


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("prompt", [
    "The quick 漢 🙂x  y", "漢字 a", " fox", "<s>a", "</s>[INST]a 漢[/INST] b [INST]c",
])  # fmt: skip
def test_a_space_before_the_prompt_has_no_place_in_its_text(
    piece_stack, prompt, add_special_tokens
):
    """The offsets are those of Hugging Face's tokenizer. The answer's first space is text."""
    path = piece_stack.model_directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    expected = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
    reply = piece_stack.tokenizer.encode_text("fox 字!")
    piece_stack.decoder.reply = reply
    choice = post(
        piece_stack, prompt=prompt, echo=True, logprobs=0, max_tokens=len(reply),
        add_special_tokens=add_special_tokens, return_token_ids=True,
    ).json()["choices"][0]  # fmt: skip
    assert choice["prompt_token_ids"] == expected.ids
    assert choice["text"] == prompt + " fox 字!"
    tokens, places = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    length = len(expected.ids)
    assert places[:length] == [first for first, _ in expected.offsets]
    assert places[length] == len(prompt)
    for token, place in zip(tokens[length:], places[length:], strict=True):
        assert "\ufffd" in token or choice["text"].startswith(token, place)


def test_prompt_logprobs_of_completions_and_chat(stack):
    messages = [{"role": "user", "content": "hello"}]
    chat = stack.chat(messages=messages, prompt_logprobs=1, n=2, return_token_ids=True).json()
    text = post(stack, prompt=["hello", PROMPT], prompt_logprobs=1, return_token_ids=True).json()
    answers = [(chat["prompt_logprobs"], chat["prompt_token_ids"])]
    answers += [(c["prompt_logprobs"], c["prompt_token_ids"]) for c in text["choices"]]
    for found, ids in answers:
        assert len(found) == len(ids) and found[0] is None
        for place, (token, row) in enumerate(zip(ids[1:], found[1:], strict=True), 1):
            token_text = stack.tokenizer.token_bytes(token).decode(errors="replace")
            own = {"logprob": -float(place), "rank": 3, "decoded_token": token_text}
            assert row[str(token)] == own
    # Of several choices one asks, and only for what was wanted.
    wants = [submit.sampling.HasField("prompt_logprobs") for submit in stack.decoder.submits]
    assert sum(wants[:2]) == 1
    assert stack.chat().json()["prompt_logprobs"] is None


def test_prompt_logprobs_are_bounded(stack):
    for response in (
        stack.chat(prompt_logprobs=1, stream=True),
        stack.chat(prompt_logprobs=21),
        stack.chat(prompt_logprobs=-1),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"
    refused = post(stack, echo=True, logprobs=1, stream=True, n=2)
    assert refused.json()["error"]["param"] == "n"


def test_priority_reaches_the_decoder(stack):
    stack.chat(priority=-3)
    post(stack, priority=7)
    assert [submit.priority for submit in stack.decoder.submits] == [-3, 7]


def test_logprobs_of_named_tokens(stack):
    answer = stack.chat(
        logprobs=True, logprob_token_ids=[7, 9], return_tokens_as_token_ids=True
    ).json()
    entry = answer["choices"][0]["logprobs"]["content"][0]
    # The sampled token is one of them, and is there once.
    names = [other["token"] for other in entry["top_logprobs"]]
    assert names == [entry["token"], "token_id:7", "token_id:9"] and len(set(names)) == 3
    assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
    post(stack, logprobs=1, logprob_token_ids=[7])
    found = [list(submit.sampling.logprob_token_ids) for submit in stack.decoder.submits]
    assert found == [[7, 9], [7]]
    assert [submit.sampling.top_logprobs for submit in stack.decoder.submits] == [0, 0]
    for fields in ({}, {"logprobs": True, "logprob_token_ids": [1 << 20]}):
        response = stack.chat(**{"logprob_token_ids": [1], **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("logprob_token_ids")


# Token ids


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stop", [[], [" circle"]])
def test_token_ids_of_prompt_and_answer(stack, path, stop):
    is_chat = path.endswith("chat/completions")
    body = {"model": MODEL, "return_token_ids": True, "stop": stop}
    if is_chat:
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = "hello"
    with stack.client() as client:
        whole = client.post(path, json=body).json()
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    answer = whole if is_chat else whole["choices"][0]
    assert answer["prompt_token_ids"] == prompt_ids(stack.decoder.submits[0])
    reply = [*stack.decoder.reply, stack.decoder.end_token]
    ids = whole["choices"][0]["token_ids"]
    assert ids == reply[: whole["usage"]["completion_tokens"]]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids", ())]
    assert streamed == ids
    first = chunks[0] if is_chat else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    with stack.client() as client:
        plain = client.post(path, json={**body, "return_token_ids": None}).json()
    answer = plain if is_chat else plain["choices"][0]
    assert plain["choices"][0]["token_ids"] is None and answer["prompt_token_ids"] is None


def test_tokens_are_named_by_their_ids(stack):
    fields = {"logprobs": 1, "echo": True, "max_tokens": 2, "return_token_ids": True}
    choice = post(stack, **fields, return_tokens_as_token_ids=True).json()["choices"][0]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids]
    assert all(name.startswith("token_id:") for t in choice["logprobs"]["top_logprobs"][1:]
               for name in t)  # fmt: skip
    entries = stack.chat(logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = entries.json()["choices"][0]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{i}" for i in choice["token_ids"][: len(names)]]


@pytest.mark.parametrize(("side", "kept"), [("left", "defg"), ("right", "abcd"), (None, "defg")])
def test_prompts_are_cut(stack, side, kept):
    ids = stack.tokenizer.encode_text("abcdefg")
    assert len(ids) == 7
    fields = {"truncate_prompt_tokens": 4, "truncation_side": side, "return_token_ids": True}
    choice = post(stack, prompt="abcdefg", **fields).json()["choices"][0]
    assert choice["prompt_token_ids"] == stack.tokenizer.encode_text(kept)
    long = "x " * stack.decoder.description.max_model_len
    response = post(stack, prompt=long, truncate_prompt_tokens=-1, max_tokens=64)
    limit = stack.decoder.description.max_model_len
    assert response.json()["usage"]["prompt_tokens"] == limit - 64
    assert post(stack, prompt=long, max_tokens=64).status_code == 400
    assert post(stack, truncate_prompt_tokens=0).json()["error"]["param"] == (
        "truncate_prompt_tokens"
    )


@pytest.mark.parametrize("prompt", ["abcdefg", None])
def test_the_echo_of_a_prompt_that_is_cut_is_what_is_left(stack, prompt):
    fields = {"truncate_prompt_tokens": 4, "echo": True, "logprobs": 0, "max_tokens": 2}
    prompt = prompt or stack.tokenizer.encode_text("abcdefg")
    choice = post(stack, prompt=prompt, **fields).json()["choices"][0]
    assert choice["text"].startswith("defg")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    short = post(stack, prompt="abc", **fields).json()["choices"][0]
    assert short["text"].startswith("abc")


@pytest.mark.parametrize(("side", "kept"), [("left", "cdef"), ("right", "abc")])
def test_the_echo_of_a_prompt_that_is_cut_has_no_bos_that_was_put_before_it(
    stack, bos_stack, side, kept
):
    fields = {"truncate_prompt_tokens": 4, "truncation_side": side, "echo": True, "logprobs": 0}
    choice = post(bos_stack, prompt="abcdef", max_tokens=1, **fields).json()["choices"][0]
    assert choice["text"] == kept + "A"
    places = [*range(4)] if side == "left" else [0, *range(3)]
    assert choice["logprobs"]["text_offset"] == [*places, len(kept)]
    # A token that the client wrote stays.
    choice = post(stack, prompt="<|im_start|>abcdef", max_tokens=1, **fields).json()["choices"][0]
    assert choice["text"] == ("cdef" if side == "left" else "<|im_start|>abc") + "A"


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_no_token_of_the_usage(stack, stream):
    first = stack.tokenizer.encode_text("A red circle.")[0]
    fields = {"max_tokens": 0, "echo": True, "stop_token_ids": [first], "stream": stream}
    stack.decoder.end_token = first
    more = {"stream_options": {"include_usage": True}} if stream else {}
    response = post(stack, **fields, **more)
    events = response.text.splitlines() if stream else [f"data: {response.text}"]
    parsed = [json.loads(e[6:]) for e in events if e.startswith("data: {")]
    choices = [choice for event in parsed for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "hello"
    assert choices[-1]["finish_reason"] == "length" and choices[-1]["stop_reason"] is None
    usage = parsed[-1]["usage"]
    assert usage["completion_tokens"] == 0
    assert usage["total_tokens"] == usage["prompt_tokens"] > 0


def test_more_ids_than_the_context_has_are_counted_before_they_are_looked_at(stack):
    for ids in ([1 << 31] * 200_000, [1] * 200_000):
        error = post(stack, prompt=ids).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_many_ids_are_a_prompt_at_once():
    """The event loop asks."""
    request = parse_completion_request(json.dumps({"prompt": [5] * 500_000}).encode())

    def ask() -> float:
        start = time.process_time()
        assert request.prompts == [request.prompt]
        return time.process_time() - start

    assert least(ask, 0.02) <= 0.02


def test_a_prompt_without_room_is_named_by_its_place(stack):
    """Also one whose tokens have to be counted."""
    for prompts in (["a", "b " * 5000], ["a", "b " * 500_000], [[1], [1] * 4096]):
        error = post(stack, prompt=prompts).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt[1]")
    error = post(stack, prompt=["a", "b"], min_tokens=99).json()["error"]
    assert error["param"] == "min_tokens"


def test_whole_answers_have_every_key_that_clients_read(stack):
    choice = post(stack).json()["choices"][0]
    assert {choice[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")} == {None}
    answer = stack.chat().json()
    assert answer["prompt_token_ids"] is None and answer["choices"][0]["token_ids"] is None
