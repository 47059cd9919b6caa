"""Forms as clients write them: how they write names, and heads that no client may write."""

from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.gateway.http.multipart import FormFile, parse_form

TYPE = "multipart/form-data; boundary=b"
TOKEN_MARKS = "!#$%&'*+-.^_`|~"
tokens = st.text(
    st.sampled_from("abcXYZ019" + TOKEN_MARKS) | st.characters(max_codepoint=126, categories=["L"]),
    min_size=1,
)
# A header has no line breaks and no NUL, and a lone surrogate has no bytes.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
any_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


def backslashed(text: str) -> str:
    """Writes a parameter as RFC 2183 has it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def of_browsers(text: str) -> str:
    """Writes a parameter as the HTML standard has it."""
    for mark in '"\r\n':
        text = text.replace(mark, f"%{ord(mark):02X}")
    return f'"{text}"'


def extended(text: str, charset: str = "utf-8") -> str:
    return f"{charset}''{quote(text, safe='', encoding=charset)}"


def part(disposition: str, content: str = "x", line: str = "Content-Disposition: ") -> str:
    return f"--b\r\n{line}{disposition}\r\n\r\n{content}\r\n"


def parse(*parts: str):
    return parse_form(TYPE, ("".join(parts) + "--b--\r\n").encode())


def refusal(*parts: str) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(*parts)
    return caught.value


@pytest.mark.parametrize(
    ("purpose", "file"),
    [
        ('name="purpose"', 'name="file"; filename="l.jsonl"'),  # httpx, curl, undici, browsers
        ("name=purpose", "name=file; filename=l.jsonl"),  # .NET
        ("name=purpose", "name=file; filename=l.jsonl; filename*=utf-8''l.jsonl"),  # .NET
        ("name=purpose", "name=\"file\"; filename*=utf-8''l.jsonl"),  # requests
        ("NAME=purpose;", 'filename="l.jsonl" ; name = file ;'),
        ('name="purpose"; x=1; y="a;b"', 'name="file";\r\n\tfilename="l.jsonl"'),
    ],
)
def test_the_forms_of_common_clients_are_read(purpose: str, file: str) -> None:
    form = parse(part(f"form-data; {purpose}", "batch"), part(f"form-data; {file}", "{}"))
    assert form.texts == {"purpose": "batch"}
    assert form.files == {"file": FormFile("l.jsonl", b"{}")}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (r'filename="a\"b\\c"', r'a"b\c'),
        ('filename="a%22b"', 'a"b'),
        (r'filename="C:\new\table.txt"', r"C:\new\table.txt"),
        ('filename="a\\"', "a\\"),
        ('filename="a\\"; x="y"', "a\\"),
        ('filename=""', ""),
        ("filename=a%22b", "a%22b"),
        ('filename="ü;=.jsonl"', "ü;=.jsonl"),
        ("filename*=UTF-8'en'%C3%BC.jsonl", "ü.jsonl"),
        ("filename*=iso-8859-1''%FC.jsonl", "ü.jsonl"),
        ("filename*=\"utf-8''%C3%BC\"", "ü"),
        ("filename=\"=?utf-8?B?w7w=?=\"; filename*=utf-8''%C3%BC", "ü"),  # .NET
        ("filename=u; filename*=klingon''x", "u"),
        ("filename=u; filename*=utf-8''%FC", "u"),
    ],
)
def test_a_files_name_is_read_as_it_was_meant(written: str, name: str) -> None:
    form = parse(part(f"form-data; name=file; {written}"))
    assert form.files == {"file": FormFile(name, b"x")}


@given(
    name=tokens, filename=tokens, space=st.sampled_from(["", " ", "\t", "\r\n "]),
    before=st.booleans(), kind=st.sampled_from(["form-data", "Form-Data"]), more=tokens,
)  # fmt: skip
def test_any_tokens_are_read(name, filename, space, before, kind, more) -> None:
    assume(more.lower().rstrip("*") not in ("name", "filename"))
    parameters = [f"name={name}", f"filename={filename}", f"{more}={more}"]
    if before:
        parameters.reverse()
    disposition = f";{space}".join((kind, *parameters))
    form = parse(part(disposition, line="content-disposition:"))
    assert form.files == {name: FormFile(filename, b"x")}


@given(name=texts, filename=texts, other=st.sampled_from(["Content-Type: text/plain\r\n", ""]))
def test_any_strings_with_backslashes_are_read(name, filename, other) -> None:
    assume("%22" not in name + filename and "%0" not in name + filename)  # a browser's escapes
    line = f"{other}Content-Disposition: "
    disposition = f"form-data; name={backslashed(name)}; filename={backslashed(filename)}"
    assert parse(part(disposition, line=line)).files == {name: FormFile(filename, b"x")}


@given(filename=any_texts)
def test_any_strings_of_browsers_are_read(filename) -> None:
    # A name that itself has an escape, or a backslash before another, has two meanings.
    assume(not any(mark in filename for mark in ("%22", "%0", "\\\\", '\\"')))
    form = parse(part(f'form-data; name="file"; filename={of_browsers(filename)}'))
    assert form.files["file"].filename == filename


@given(name=any_texts, filename=any_texts, plain=st.none() | tokens)
def test_any_extended_values_are_read(name, filename, plain) -> None:
    disposition = f"form-data; name*={extended(name)}; filename*={extended(filename)}"
    if plain is not None:
        disposition += f"; filename={plain}"
    assert parse(part(disposition)).files == {name: FormFile(filename, b"x")}


@pytest.mark.parametrize(
    ("disposition", "reason"),
    [
        ("attachment; name=a", "begins with 'attachment; name=a' and not with form-data"),
        ("", "begins with '' and not with form-data"),
        ("form-data", "has no name"),
        ("form-data; name=", "cannot be read from 'name=' on"),
        ('form-data; name=""', "has no name"),
        ('form-data; name="a', "cannot be read from"),
        ('form-data; name=a"b"', "cannot be read from"),
        ("form-data; name=a b", "cannot be read from 'name=a b' on"),
        ("form-data; name", "cannot be read from 'name' on"),
        ("form-data; =a", "cannot be read from '=a' on"),
        ("form-data; name=a; NAME=b", "has name twice in its head"),
        ("form-data; name=a; filename*=l.jsonl", "filename* in the head of part 2"),
        ("form-data; name=a; filename*=utf-8''%FC", "filename* in the head of part 2"),
        ("form-data; name=a; filename*=utf-8''%F", "filename* in the head of part 2"),
        ("form-data; name=a\r\nContent-Disposition: form-data; name=b", "two Content-Dispositions"),
        ("form-data; name=first", "the form has this field twice"),
    ],
)
def test_a_malformed_head_is_refused_with_its_reason(disposition: str, reason: str) -> None:
    error = refusal(part("form-data; name=first"), part(disposition))
    assert reason in error.message
    assert "part 2" in error.message or error.param == "first"


def test_a_part_without_a_disposition_is_refused() -> None:
    assert "part 1 of the form has no Content-Disposition" in refusal("--b\r\n\r\nx\r\n").message
    other = refusal(part("text/plain", line="Content-Type: "))
    assert "part 1 of the form has no Content-Disposition" in other.message


@given(head=st.text(st.sampled_from("name*=file;\"\\ \t\r\n%2'utf-8a")))
def test_no_head_is_anything_but_read_or_refused(head) -> None:
    try:
        form = parse(part(f"form-data; {head}"))
    except InvalidRequest as error:
        assert error.message
    else:
        assert len(form.texts) + len(form.files) == 1


@pytest.mark.parametrize("mark", ["\\", '"', '\\"', " ", "=", ";", "a", "%", '="', ';"'])
def test_a_long_head_takes_no_long_time(mark: str) -> None:
    """A pattern that tries several readings of each backslash would not end."""
    for start in ('name="', "name=", "", 'name="\\', "filename*=utf-8''"):
        try:
            parse(part(f"form-data; {start}{mark * (8000 // len(mark))}"))
        except InvalidRequest as error:
            assert len(error.message) < 300
