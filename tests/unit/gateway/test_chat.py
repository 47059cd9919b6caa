"""What the gateway sends to the services, and how choices end."""

from tests.gateway_fixtures import asking, image_url
from tests.tiny_tokenizer import added_ids

# Requests to the services


def test_the_decoder_gets_every_field(stack):
    first, second = image_url(300, 200), image_url(64, 64)
    response = stack.chat(
        messages=asking(first, second, first), temperature=0.5, seed=3, max_tokens=9,
        logit_bias={"5": 2.5}, stop_token_ids=[6], cache_salt="tenant", n=2,
    )  # fmt: skip
    assert response.status_code == 200
    one, two = stack.decoder.submits
    assert one.prompt_token_ids == two.prompt_token_ids
    assert (one.sampling.seed, two.sampling.seed) == (3, 4)
    assert one.sampling.temperature == 0.5
    assert dict(one.sampling.logit_bias) == {5: 2.5}
    assert 6 in one.sampling.stop_token_ids
    assert one.cache_salt == b"tenant"
    assert 0 < one.timeout_s <= 300
    assert one.request_id == response.headers["x-request-id"]
    assert [image.num_tokens for image in one.images] == [70, 64, 70]
    assert len(one.positions) == 3 * len(one.prompt_token_ids)
    assert one.images[0].image_key == one.images[2].image_key != one.images[1].image_key
    assert {image.encoder_address for image in one.images} == {stack.encoder.address}
    # n choices and a repeated image: each image is encoded once.
    assert len(stack.encoder.requests) == 2
    assert stack.encoder.request_ids == [one.request_id] * 2


def test_bad_words_may_name_added_tokens(stack):
    """As transformers encodes them."""
    words = ["<think>", "<tool_call>\n", "a<|im_end|>b</think></think>", "<thin", "<|im_end|"]
    assert stack.chat(bad_words=words).status_code == 200
    found = [list(word.ids) for word in stack.decoder.submits[0].sampling.bad_words]
    assert found[0] == [added_ids()["<think>"]]
    for word in words:
        expected = stack.tokenizer.encode_prompt(word, False)
        assert expected in found


def test_text_calls_no_encoder(stack):
    body = stack.chat().json()
    assert body["choices"][0]["message"]["content"] == "A red circle."
    assert stack.decoder.submits[0].positions == b""
    assert not stack.encoder.requests


def test_salt_changes_the_image_key(stack):
    for salt in ("a", "b", "a"):
        stack.chat(messages=asking(image_url()), cache_salt=salt)
    keys = [submit.images[0].image_key for submit in stack.decoder.submits]
    assert keys[0] == keys[2] != keys[1]


def test_pixel_limits_change_the_key(stack):
    url = image_url(600, 600)
    stack.chat(messages=asking(url))
    stack.chat(messages=asking(url), max_pixels=70_000)
    images = [submit.images[0] for submit in stack.decoder.submits]
    assert images[0].image_key != images[1].image_key
    assert images[0].num_tokens > images[1].num_tokens


# Stop strings, seeds, choices


def test_stop_string_cancels_the_sequence(stack):
    stack.decoder.reply = stack.tokenizer.encode_text("one two three four five six seven")
    stack.decoder.delay_s = 0.02
    body = stack.chat(stop=["three"]).json()
    assert body["choices"][0]["message"]["content"] == "one two "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
    stack.wait(lambda: stack.decoder.cancelled and not stack.decoder.running)


def test_each_choice_ends_alone(stack):
    body = stack.chat(n=3, max_tokens=2).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert {c["finish_reason"] for c in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 6
