# ruff: noqa: RUF001 - look-alike characters are the point
"""The table of hostile inputs: (name, body or bytes, status, param).

`param` None means: whatever it is.
"""

import base64
import io
import json
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from tests.gateway_fixtures import image_url
from tests.gateway_stack import MODEL
from tests.tiny_tokenizer import vocab_size

HELLO = [{"role": "user", "content": "hello"}]
IMAGE = "messages[0].content[0]"
Row = tuple[str, object, int, str | None]


def body(**fields) -> dict:
    return {"model": MODEL, "messages": HELLO, **fields}


def content(*parts) -> dict:
    return body(messages=[{"role": "user", "content": list(parts)}])


def image(url: object, **fields) -> dict:
    return content({"type": "image_url", "image_url": {"url": url, **fields}})


def data(raw: bytes, kind: str = "image/png") -> dict:
    return image(f"data:{kind};base64,{base64.b64encode(raw).decode()}")


def encoded(width: int, height: int, form: str = "PNG", mode: str = "RGB", **options) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, form, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG with a size and no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )


def bad_values() -> Iterator[Row]:
    """Fields out of their type or range."""
    wrong: dict[str, list[object]] = {
        "model": [1, [], {}],
        "messages": [None, "x", {}, [], [1], [None], [[]], HELLO * 2049],
        "temperature": [-0.1, 2.1, "1", [], True, 1e308],
        "top_p": [0, -1, 1.1, "x"],
        "top_k": [-2, 1.5, "x", 1 << 40],
        "min_p": [-0.1, 1.1],
        "repetition_penalty": [0, -1, 11, 1e-38, 1e-300, 9e-7],
        "presence_penalty": [-2.1, 2.1],
        "frequency_penalty": [-2.1, 2.1, "x"],
        "n": [0, -1, 9, 1 << 31, 1 << 70, 1.5, "1", True],
        "max_tokens": [0, -1, 1.5, "x", 1 << 40],
        "max_completion_tokens": [0, -1],
        "min_tokens": [-1, 1 << 40],
        "seed": [1 << 63, -(1 << 63) - 1, "x", 0.5],
        "stop": [5, ["x"] * 17, [5], [""], "", "x" * 257, {}],
        "stop_token_ids": [[-1], [vocab_size()], [vocab_size() + 1], [1 << 63], [1 << 70],
                           [1.5], ["1"], 5, [1] * 129, [[1]]],
        "logit_bias": [{"x": 1}, {"-1": 1}, {str(vocab_size()): 1}, {str(1 << 63): 1},
                       {"1": 101}, {"1": -101}, {"1": "x"}, {"1": None}, {" 1": 1}, {"+1": 1},
                       {"1_0": 1}, {"١": 1}, {"": 1}, {"1.0": 1}, {"0x1": 1}, [1], 5,
                       {str(i): 0 for i in range(1025)}],
        "logprobs": [1, "true"],
        "stream": ["yes", 1],
        "ignore_eos": [1], "skip_special_tokens": ["x"], "include_stop_str_in_output": [0],
        "cache_salt": ["", "x" * 129, "😀" * 65, "a/b", "a@b", "a\\b", "a\x00b", 5],
        "min_pixels": [0, -1, "x", 1 << 40], "max_pixels": [0, 1.5],
        "include_stage_times": ["yes"],
        "tools": ["x", {}, [1], [{}], [{"type": 5}], [FUNCTION] * 129, [FUNCTION] * 2,
                  [function(name="")], [function(name="a\nb")], [function(parameters=[1])],
                  [function(parameters="x")], [function(strict=1)], [function(x=1)]],
        "parallel_tool_calls": [1, "x"], "reasoning_effort": [1, "x", []],
        "chat_template_kwargs": [1, "x", [1]], "add_generation_prompt": [1],
    }  # fmt: skip
    for field, values in wrong.items():
        for index, value in enumerate(values):
            param = (
                None
                if field in ("messages", "stop", "stop_token_ids", "logit_bias", "tools")
                else field
            )
            yield f"{field} {index}", body(**{field: value}), 400, param
    for bias, key in (({"1": 0, "2": "x"}, "2"), ({"7": 101}, "7"), ({"-1": 1}, "-1")):
        yield f"logit_bias of {key}", body(logit_bias=bias), 400, f"logit_bias.{key}"
    yield "top_logprobs alone", body(top_logprobs=2), 400, "top_logprobs"
    for value in (-1, 21):
        yield f"top_logprobs {value}", body(logprobs=True, top_logprobs=value), 400, "top_logprobs"
    yield "stream_options alone", body(stream_options={}), 400, "stream_options"
    yield (
        "stream_options unknown",
        body(stream=True, stream_options={"x": 1}),
        400,
        "stream_options.x",
    )
    yield "min over max", body(min_tokens=5, max_tokens=4), 400, "min_tokens"
    yield (
        "min over max pixels",
        {**image(image_url()), "min_pixels": 9, "max_pixels": 8},
        400,
        IMAGE,
    )
    for number in ("NaN", "Infinity", "-Infinity"):
        raw = json.dumps(body()).replace('"model"', f'"temperature": {number}, "model"')
        yield f"temperature {number}", raw.encode(), 400, None
    raw = json.dumps(body()).replace('"model"', '"temperature": 1e999, "model"').encode()
    yield "temperature 1e999", raw, 400, "temperature"


def function(**fields: object) -> dict:
    return {"type": "function", "function": {"name": "f", **fields}}


FUNCTION = function()


def tools() -> Iterator[Row]:
    """Tools, choices, calls and template variables that are not what they should be."""
    deep: object = 1
    for _ in range(700):
        deep = {"a": deep}
    for name, parameters, param in (
        ("deep", {"properties": deep}, "tools[0].function.parameters"),
        ("array", {"type": "array"}, "tools[0].function.parameters.type"),
        ("odd type", {"type": ["array", "null"]}, "tools[0].function.parameters.type"),
    ):
        request = body(tools=[function(parameters=parameters)], tool_choice="required")
        yield f"parameters {name}", request, 400, param
    for index, choice in enumerate(
        ("any", 1, {}, {"type": "x"}, {"type": "function"},
         {"type": "function", "function": {"name": "g"}},
         {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}})
    ):  # fmt: skip
        yield f"tool_choice {index}", body(tools=[FUNCTION], tool_choice=choice), 400, None
    for name in (
        "messages",
        "bos_token",
        "namespace",
        "raise_exception",
        "__class__",
        "",
        "x" * 500,
    ):
        yield f"variable {name[:20]}", body(chat_template_kwargs={name: 1}), 400, None


def unserved() -> Iterator[Row]:
    """Fields that would change the answer, unknown fields, other roles and parts."""
    for field, value in {
        "tool_choice": "required", "functions": [{}], "function_call": {"name": "f"},
        "modalities": ["audio"],
        "audio": {"voice": "x"}, "web_search_options": {"a": 1}, "best_of": 4,
        "chat_template": "{{ 1 }}", "guided_regex": "(a+)+",
        "prompt_embeds": "x", "bad_words": ["x"] * 10000,
        "allowed_token_ids": [], "continue_final_message": True,
        "documents": [{}], "kv_transfer_params": {"a": 1}, "lora": "x", "__class__": 1,
        "": 1,
    }.items():  # fmt: skip
        yield f"unserved {field}", body(**{field: value}), 400, field or None
    for given, param in (
        ({"type": "json_schema"}, ".json_schema"),
        ({"type": "grammar"}, ".type"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, ".json_schema.schema"),
    ):
        yield f"format {given}", body(response_format=given), 400, f"response_format{param}"
    for wanted in ({"choice": []}, {"regex": "a", "choice": ["a"]}, {}):
        yield f"structured {wanted}", body(structured_outputs=wanted), 400, None
    for field in ("tokenize", "add_generation_prompt", "chat_template", "messages"):
        yield (
            f"kwargs {field}",
            body(chat_template_kwargs={field: 1}),
            400,
            f"chat_template_kwargs.{field}",
        )
    yield "media kwargs", body(media_io_kwargs={"a": 1}), 400, "media_io_kwargs.a"
    yield "processor kwargs", body(mm_processor_kwargs={"size": 1}), 400, "mm_processor_kwargs.size"
    lost = {"role": "tool", "content": "x"}
    yield "tool without a call", body(messages=[lost]), 400, "messages[0].tool_call_id"
    for role in ("function", "root", "", "User", 5, None):
        message = {"role": role, "content": "x"}
        yield f"role {role}", body(messages=[message]), 400, "messages[0].role"
    for field, value in {"prefix": True, "tool_call_id": "x"}.items():
        message = {"role": "assistant", "content": "x", field: value}
        yield f"message {field}", body(messages=[message]), 400, f"messages[0].{field}"
    message = {"role": "assistant", "content": "x", "tool_calls": [{}]}
    yield "empty call", body(messages=[message]), 400, "messages[0].tool_calls[0].id"
    image_part = {"type": "image_url", "image_url": {"url": image_url()}}
    for role in ("system", "assistant", "developer"):
        message = {"role": role, "content": [image_part]}
        yield f"image in {role}", body(messages=[message]), 400, IMAGE
    for value in (None, 5, {}, True):
        yield f"content {value}", body(messages=[{"role": "user", "content": value}]), 400, None
    yield "no content", body(messages=[{"role": "user"}]), 400, "messages[0].content"
    for part in (
        "x", 5, None, [], {}, {"type": "text"}, {"type": "text", "text": None},
        {"type": "text", "text": 5}, {"type": "text", "text": "x", "image_url": "y"},
        {"type": "video_url", "video_url": {"url": "x"}}, {"type": "audio_url"},
        {"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}},
        {"type": "image", "image": "/etc/passwd"}, {"type": "image_embeds", "image_embeds": "x"},
        {"type": "image_pil"}, {"type": 5, "text": "x"}, {"text": "x"}, {"image_url": "x"},
        {"type": "image_url"}, {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {}}, {"type": "image_url", "image_url": {"url": None}},
        {"type": "image_url", "image_url": {"url": "x", "uuid": "y"}},
        {"type": "image_url", "image_url": {"url": image_url(), "detail": "ultra"}},
        {"type": "image_url", "image_url": {"url": image_url(), "min_pixels": -1}},
    ):  # fmt: skip
        yield f"part {json.dumps(part)[:40]} {json.dumps(part)[-40:]}", content(part), 400, None
    yield "ten thousand parts", content(*[{"type": "text", "text": "x"}] * 10000), 400, None
    yield "five images", content(*[image_part] * 5), 400, "messages"


def bad_urls() -> Iterator[Row]:
    """URLs that must not be followed, and data that is no image."""
    urls = [
        "", " ", "x", "/etc/passwd", "../../etc/passwd", "file:///etc/passwd", "FILE:///etc/passwd",
        "file:/etc/passwd", "file://localhost/etc/passwd", "ftp://h/x", "gopher://h/", "jar:x",
        "dict://127.0.0.1:6379/INFO", "ldap://h", "javascript:alert(1)", "blob:x", "about:blank",
        "//127.0.0.1/x", "http:", "http://", "http:///", "http:127.0.0.1", "https://",
        "http://127.0.0.1/", "http://127.0.0.1:6379/", "http://localhost/", "http://LOCALHOST/",
        "http://[::1]/", "http://[::]/", "http://0.0.0.0/", "http://0/", "http://127.1/",
        "http://2130706433/", "http://0x7f000001/", "http://017700000001/", "http://0177.0.0.1/",
        "http://127.0.0.1./", "http://10.0.0.1/", "http://172.16.0.1/", "http://192.168.0.1/",
        "http://169.254.169.254/latest/meta-data/", "http://100.64.0.1/", "http://[fc00::1]/",
        "http://[fe80::1]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://[ff02::1]/",
        "http://224.0.0.1/", "http://255.255.255.255/", "http://198.18.0.1/",
        "http://good\\@127.0.0.1/", "http://user@127.0.0.1/", "http://a:b@example.com/",
        "http://example.com\\@127.0.0.1/", "http://ex\tample.com/", "http://exam\nple.com/",
        "http://example.com:0/", "http://example.com:99999/", "http://example.com:x/",
        "http://１２７.0.0.1/", "http://%31%32%37.0.0.1/", "http://[::1", "http://..", "http://a..b/",
        "http://127.0.0.1#@example.com/", "http://127.0.0.1%2523@example.com/", "http://-x/",
        "http://" + "a" * 9000, "http://x/\x00", "http://①②⑦.⓪.⓪.①/",
        "data:", "data:,x", "data:image/png,x", "data:image/png;base64,",
        "data:image/png;base64,@@",
        "data:image/png;base64,YWJj YWJj", "data:image/png;base64,YWJ", "data:;base64,-_-_",
        "data:text/plain;base64,YWJj", "data:video/mp4;base64,YWJj",
        "data:image/svg+xml;base64,PHN2Zz4=", "data:application/pdf;base64,YWJj",
        "data:image/png;base64," + "A" * (1 << 21), "data:" + "a" * 5000,
        "data:image/png;base64,data:image/png;base64,YWJj",
    ]  # fmt: skip
    for index, url in enumerate(urls):
        yield f"url {index} {url[:40]!r}", image(url), 400, IMAGE
        part = {"type": "video_url", "video_url": {"url": url}}
        yield f"video url {index} {url[:40]!r}", content(part), 400, IMAGE
    yield "url number", image(5), 400, None


def bad_images() -> Iterator[Row]:
    """Bytes that are no image, or none that is served."""
    good = encoded(50, 50)
    rows = {
        "garbage": b"\x00\x01garbage" * 10, "text": b"hello", "html": b"<html></html>",
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>", "pdf": b"%PDF-1.4",
        "png magic": good[:8], "png half header": good[:20], "empty gif": b"GIF89a",
        "gif without size": b"GIF89a\x00\x00\x00\x00\x00\x00\x00", "jpeg magic": b"\xff\xd8\xff",
        "webp magic": b"RIFF\x10\x00\x00\x00WEBPVP8 ", "bmp": encoded(9, 9, "BMP"),
        "tiff": encoded(9, 9, "TIFF"), "ppm": encoded(9, 9, "PPM"), "ico": encoded(32, 32, "ICO"),
        "pcx": encoded(9, 9, "PCX"), "tga": encoded(9, 9, "TGA"), "eps": encoded(9, 9, "EPS"),
        "jpeg 2000": encoded(40, 40, "JPEG2000"), "psd": b"8BPS\x00\x01" + b"\x00" * 40,
        "icns": b"icns\x00\x00\x00\x08", "fits": b"SIMPLE  = T", "xbm": b"#define x_width 9\n",
        "wmf": b"\xd7\xcd\xc6\x9a" + b"\x00" * 40, "zip": b"PK\x03\x04" + b"\x00" * 40,
        "gzip": b"\x1f\x8b" + b"\x00" * 40, "elf": b"\x7fELF" + b"\x00" * 40,
        "pickle": b"\x80\x04\x95\x00\x00\x00.", "bomb header": png_header(60000, 60000),
        "wide bomb": png_header(1 << 30, 1), "zero width": png_header(0, 10),
        "zero height": png_header(10, 0), "negative": png_header(0xFFFFFFFF, 0xFFFFFFFF),
        "aspect 201": encoded(2010, 10), "aspect tall": encoded(1, 300),
        "over the pixel limit": encoded(2001, 2000, "GIF", "L"),
        "polyglot": b"GIF8" + good,
    }  # fmt: skip
    for name, raw in rows.items():
        yield f"image {name}", data(raw), 400, IMAGE
    second = {"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}
    first = {"type": "image_url", "image_url": {"url": image_url()}}
    yield (
        "second image",
        content(first, {"type": "text", "text": "x"}, second),
        400,
        ("messages[0].content[2]"),
    )


def bad_bodies() -> Iterator[Row]:
    """Bodies that are not valid JSON."""
    for index, raw in enumerate(
        [
            b"", b"x", b"null", b"[]", b"5", b'"x"', b"{", b"}", b"{}", b'{"model":', b"\xff\xfe",
            b'{"model":"\xff"}', b"[" * 200_000, b'{"a":' * 40_000,
            b'{"messages":' + b"[" * 99_999,
            b'{"metadata":' + b"[" * 200_000, b"\x00", b"{'model': 'x'}",
            b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
            b'{"model":"tiny","messages":[{"role":"user","content":"x"}],}',
            json.dumps(body()).encode("utf-16"), b"\xef\xbb\xbf" + json.dumps(body()).encode(),
            json.dumps(body()).encode() + b"x", b"model=tiny", b"1" * 100_000,
            b'{"model":"tiny","metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5000
            + b',"tools":' + b"[" * 5000 + b"]" * 5000
            + b',"messages":[{"role":"user","content":"x"}]}',
        ]
    ):  # fmt: skip
        yield f"body {index}", raw, 400, None
    yield "too many members", b'{"a":' * 100_000, 413, None
    yield "no messages", {"model": MODEL}, 400, "messages"
    for name in ("other", "", "../tiny", "tiny\x00", "x" * 10000, "0xdeadbeef01"):
        yield f"model {len(name)} {name[:20]!r}", body(model=name), 404, "model"
    yield (
        "prompt too long",
        body(messages=[{"role": "user", "content": "a b " * 5000}]),
        400,
        "messages",
    )
    yield (
        "far too long",
        body(messages=[{"role": "user", "content": "x" * (1 << 20)}]),
        400,
        "messages",
    )
    yield (
        "one long word",
        body(messages=[{"role": "user", "content": "x" * 20000}]),
        400,
        "messages",
    )
    yield "images over context", {
        **content(*[{"type": "image_url", "image_url": {"url": image_url(1024, 1024)}}] * 4)
    }, 400, "messages"  # fmt: skip


ROWS = [*bad_values(), *tools(), *unserved(), *bad_urls(), *bad_images(), *bad_bodies()]
