"""Formats of JSON schemas as regular expressions that a whole string has to match.

For values written as bare text, which the decoder's own formats, of JSON strings, do not reach.
Each takes strings of the format, and not all of those that are rare: a comment, a leap second, a
literal address in an e-mail.
"""

_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9A-Fa-f]{1,4}"


def _up_to(groups: int) -> str:
    return f"(?:{_GROUP}(?::{_GROUP}){{0,{groups - 1}}})?"


_IPV6 = "|".join(
    [f"(?:{_GROUP}:){{7}}{_GROUP}", *(f"{_up_to(n)}::{_up_to(7 - n)}" for n in range(1, 7))]
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"  # four labels are below the limit of 253
_ATOM = r"[A-Za-z0-9!#$%&'*+\x2F=?^_`{|}~-]{1,20}"
_DATE = (
    "[0-9]{3}[1-9]-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_PATH_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PATH = rf"{_PATH_CHARACTER}*(?:\x2F{_PATH_CHARACTER}*)*"
_AUTHORITY = rf"\x2F\x2F{_HOST}(?::[0-9]{{1,4}})?"
_QUERY = rf"(?:\?(?:{_PATH_CHARACTER}|[\x2F?])*)?(?:\#(?:{_PATH_CHARACTER}|[\x2F?])*)?"
_AFTER_SCHEME = rf"(?:{_AUTHORITY}(?:\x2F{_PATH})?|{_PATH_CHARACTER}{_PATH})"
TEXT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"(?:{_DATE})T{_TIME}",
    "duration": f"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_AFTER_SCHEME}{_QUERY}",
    "uuid": "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
}  # fmt: skip
