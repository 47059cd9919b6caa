"""Operations of templates on a request's text: Jinja's text, and the template's characters told
apart from the request's.
"""

import random

import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.prompts.template_environment import TemplateEnvironment
from services.gateway.prompts.traced_text import (
    BLANK,
    TracedText,
    request_text,
    shadow_of,
    template_text,
)

VARIABLES = {"x": "<b> C", "y": "a,<b>,c", "items": ["<e>", "f"], "d": {"<k>": "<v>"}}
# A template, and its text with a dot for each character of the request.
OPERATIONS = [
    ("{{ x }}", "....."),
    ("<a>{{ x }}<a>", "<a>.....<a>"),
    ("{{ '<a>' + x + '<a>' }}", "<a>.....<a>"),
    ("{{ '<a>' ~ x ~ 3 ~ none }}", "<a>.....3None"),
    ("{{ ['<a>'] ~ [x] }}", "." * len("['<a>']['<b> C']")),
    ("{{ x * 2 }}<a>{{ 2 * x }}", "..........<a>.........."),
    ("{{ '%s<a>%s' % (x, 'z') }}", ".....<a>z"),
    ("{{ '%(k)s<a>' % {'k': x} }}", ".....<a>"),
    ("{{ '%s' % x }}<a>", ".....<a>"),
    ("{{ '%-7s<a>' % x }}", ".....  <a>"),
    ("{{ '<a>%r' % [x] }}", "." * len("<a>['<b> C']")),
    ("{{ 5 % 3 }}<a>", "2<a>"),
    ("{{ '<a>%s' | format(x) }}", "<a>....."),
    ("{{ '{}<a>{:d}'.format(x, 3) }}", ".....<a>3"),
    ("{{ '{k}<a>'.format(k=x) }}", ".....<a>"),
    ("{{ '{k}<a>'.format_map({'k': x}) }}", ".....<a>"),
    ("{{ '{0[t]}<a>'['format']({'t': x}) }}", ".....<a>"),
    ("{{ '{!r}<a>'.format(x) }}", "." * len("'<b> C'<a>")),
    ("{{ x.format() }}<a>", ".....<a>"),
    ("{{ x | replace('b', '<a>') }}", ".<a>..."),
    ("{{ '<q>' | replace('q', x) }}", "<.....>"),
    ("{{ '<q>'.replace('q', x) }}", "<.....>"),
    ("{{ x.replace('', '-') }}", "-.-.-.-.-.-"),
    ("{{ x.replace(' ', '<a>', 0) }}", "....."),
    ("{{ [x, '<a>'] | join('|') }}", ".....|<a>"),
    ("{{ items | join('<a>') }}", "...<a>."),
    ("{{ '<a>'.join([x, 'q']) }}", ".....<a>q"),
    ("{{ x.join(['<', '>']) }}", "<.....>"),
    ("{{ [{'t': x}, {'t': 'q'}] | join('<a>', attribute='t') }}", ".....<a>q"),
    ("{{ [[x], '<a>'] | join }}", "." * len("['<b> C']") + "<a>"),
    ("{{ (' <a> ' + x + ' ') | trim }}", "<a> ....."),
    ("{{ (' ' ~ x ~ '<a>\n').strip() }}", ".....<a>"),
    ("{{ (' ' ~ x ~ '<a>\n').lstrip() }}", ".....<a>\n"),
    ("{{ ('\n<a>' ~ x).rstrip('C') }}", "\n<a>...."),
    ("{{ [x] | trim }}", "." * len("['<b> C']")),
    ("{{ ('<a>' ~ y).split(',')[0] }}{{ y.split(',')[1] }}", "<a>...."),
    ("{{ y.split('<b>') | join('<a>') }}", "..<a>.."),
    ("{{ (y ~ ',<a>').rsplit(',', 2) | join('|') }}", ".....|.|<a>"),
    ("{{ (x ~ ' <a>').split() | join('|') }}", "...|.|<a>"),
    ("{{ ('<a>\n' ~ x ~ '\r\n').splitlines() | join('|') }}", "<a>|....."),
    ("{{ ('<a>\n' ~ x).splitlines(true) | join('|') }}", "<a>\n|....."),
    ("{{ ('<a>=' ~ x).partition('=') | join }}", "<a>=....."),
    ("{{ ('<a>=' ~ x).rpartition('=')[2] }}", "....."),
    ("{{ ('<a>' ~ x).removeprefix('<a>') }}{{ (x ~ '<a>').removesuffix('C<a>') }}", "." * 9),
    ("{{ x[0] }}<a>{{ x[1:] }}{{ (x ~ '<a>')[-3:] }}", ".<a>....<a>"),
    ("{% for c in '<a>' ~ x %}{{ c }}|{% endfor %}", "<|a|>|.|.|.|.|.|"),
    ("{{ x | list | join }}{{ x | first }}{{ x | last }}{{ x | reverse }}<a>", "." * 12 + "<a>"),
    ("{{ ('<A>' ~ x) | lower }}{{ ('<a>' ~ x).upper() }}", "<a>.....<A>....."),
    ("{{ ('<a>' ~ 'ß' ~ x) | upper }}", "." * 10),
    ("{{ (x ~ 'Q') | capitalize }}{{ (x ~ ' q').title() }}", ".....q..... Q"),
    ("{{ (x ~ 'q').swapcase() }}{{ (x ~ 'Q').casefold() }}", ".....Q.....q"),
    ("{{ x | center(9) }}{{ x.ljust(7, '-') }}{{ x.rjust(6) }}", "  .....  .....-- ....."),
    ("{{ x.center(7, x[0]) }}", "......."),
    ("{{ ('<a>' ~ x).zfill(9) }}{{ ('<a>' ~ x).expandtabs() }}", "." * 17),
    ("{{ ('<a>' ~ x).translate({66: '<'}) }}", "." * 8),
    ("{{ x | tojson }}<a>", ".......<a>"),
    ("{{ {'k': x} | tojson(indent=1) }}<a>", "." * len('{\n "k": "<b> C"\n}') + "<a>"),
    ("{{ 5 | tojson }}{{ '<a>' | tojson }}", '5"<a>"'),
    ("{{ d }}{{ d.keys() | list }}<a>", "." * len("{'<k>': '<v>'}['<k>']") + "<a>"),
    ("{% for k, v in d | items %}<{{ k }}>{{ v }}{% endfor %}", "<...>..."),
    ("{{ d['<k>'] ~ d.get('<k>') ~ d | dictsort | first | last }}<a>", "." * 9 + "<a>"),
    ("{% macro m(t) %}<a>{{ t }}{% endmacro %}{{ m(x) }}{{ m(' ') | trim }}", "<a>.....<a>"),
    ("{% macro m() %}<a>{{ caller() }}{% endmacro %}{% call m() %}{{ x }}{% endcall %}",
     "<a>....."),
    ("{% set s %}<a>{{ x }}{% endset %}{{ s ~ '<a>' }}", "<a>.....<a>"),
    ("{% filter upper %}<a>{{ x }}{% endfilter %}", "<A>....."),
    ("{% block b %}<a>{{ x }}{% endblock %}{{ self.b() | trim }}", "<a>.....<a>....."),
    ("{% generation %}<a>{{ x }}{% endgeneration %}", "<a>....."),
    ("{% autoescape true %}{{ x }}{{ '<a>' ~ x }}{% endautoescape %}",
     "." * len("&lt;b&gt; C&lt;a&gt;&lt;b&gt; C")),
    ("{{ x | safe }}{{ x | e }}<a>", "....." + "." * len("&lt;b&gt; C") + "<a>"),
    ("{{ (x | e).unescape() }}{{ (x | safe).upper() }}<a>", "..........<a>"),
    ("{{ '<a>' + (x | safe) }}{{ (x | safe) + '<a>' }}", "." * 2 * len("&lt;a&gt;<b> C")),
    ("{{ x.encode().decode() }}{{ x.encode() }}<a>", "....." + "." * len("b'<b> C'") + "<a>"),
    ("{{ x | indent(2, true) }}{{ x | title }}{{ x | wordwrap(2) }}<a>", "  " + "." * 16 + "<a>"),
    ("{{ x | truncate(4, true, '', 0) }}{{ x | urlencode }}<a>", "." * 4 + "." * 11 + "<a>"),
    ("{{ x | pprint }}{{ ('q' ~ x) | striptags }}<a>", "." * 7 + "..." + "<a>"),
    ("{{ {'k': x} | xmlattr }}<a>", "." * len(' k="&lt;b&gt; C"') + "<a>"),
    ("{{ strftime_now(x) }}<a>", ".....<a>"),
    ("{{ x | default('q') }}{{ z | default('<a>') }}{{ z }}<a>", ".....<a><a>"),
    ("{{ x | string }}{{ 5 | string }}{{ '<a>' | string }}", ".....5<a>"),
    ("{{ items | map('upper') | join('<a>') }}", "...<a>."),
    ("{{ items | sort | unique | select('ne', 'f') | list | random }}<a>", "...<a>"),
    ("{{ ['<a>', x] | first }}{{ ['<a>', x] | max }}", "<a>....."),
    ("{% set n = namespace(t='') %}{% for i in items %}{% set n.t = n.t + '<a>' + i %}{% endfor %}"
     "{{ n.t }}", "<a>...<a>."),
    ("{{ dict(k=x).k }}{{ cycler(x, 'q').next() }}<a>", "..........<a>"),
    ("{{ x is string and x == '<b> C' and '<b>' in x and x.startswith('<b>') }}", "True"),
    ("{{ x | length }}{{ x.find('C') }}{{ x.count('b') }}{{ x < 'a' }}{{ x in ['<b> C'] }}",
     "541TrueTrue"),
]  # fmt: skip

# Operations whose text counts as the request's, whatever it is made of.
OPAQUE = (
    "tojson", "safe", "| e ", "encode", "[x] ", "[[x]", "[x] }}", "{{ d }}", "xmlattr", "pprint",
    "translate", "autoescape",
)  # fmt: skip


def compiled(source: str):
    environment = TemplateEnvironment()
    return environment.compile_tree(environment.parse(source))


def plain(source: str):
    """The template as transformers compiles it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    own = TemplateEnvironment()
    environment.filters["tojson"] = own.filters["tojson"]
    environment.globals["strftime_now"] = own.globals["strftime_now"]
    for tag in ("{% generation %}", "{% endgeneration %}"):
        source = source.replace(tag, "")
    return environment.from_string(source)


def of_request(value):
    if isinstance(value, str):
        return request_text(value)
    if isinstance(value, dict):
        return {request_text(key): of_request(item) for key, item in value.items()}
    return [of_request(item) for item in value]


def marked(text: str) -> str:
    return shadow_of(text).replace(BLANK, ".")


@pytest.mark.parametrize(("source", "expected"), OPERATIONS, ids=[row[0] for row in OPERATIONS])
def test_an_operation_has_jinjas_text_and_keeps_traces(source, expected):
    found = compiled(source).render({name: of_request(v) for name, v in VARIABLES.items()})
    assert found == plain(source).render(VARIABLES)
    assert marked(found) == expected


@pytest.mark.parametrize(
    "source", [source for source, _ in OPERATIONS if not any(part in source for part in OPAQUE)]
)
def test_text_of_the_template_alone_stays_its_own(source):
    found = compiled(source).render(VARIABLES)
    assert found == plain(source).render(VARIABLES)
    assert type(found) is str


ARGUMENTS = {
    "center": (9, "<"), "count": ("b",), "encode": (), "endswith": ("C",), "expandtabs": (4,),
    "find": ("b",), "index": ("b",), "join": (["p", "q"],), "ljust": (9,),
    "maketrans": ({66: "<"},), "partition": ("b",), "removeprefix": ("<",),
    "removesuffix": ("C",), "replace": ("b", "d"), "rfind": ("b",), "rindex": ("b",),
    "rjust": (9,), "rpartition": ("b",), "startswith": ("<",), "translate": ({66: "<"},),
    "zfill": (9,),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name in dir(str) if not name.startswith(("_", "format"))]
)
def test_each_method_of_str_keeps_traces(name):
    text = "<b>\tC\nß"
    found = getattr(request_text(text), name)(*ARGUMENTS.get(name, ()))
    assert found == getattr(text, name)(*ARGUMENTS.get(name, ()))
    for each in found if isinstance(found, list | tuple) else [found]:
        assert type(each) in (TracedText, bytes, int, bool, dict)


def test_a_traced_text_shows_templates_no_more_than_str_has():
    assert {n for n in dir(TracedText) if n[0] != "_"} == {n for n in dir(str) if n[0] != "_"}
    source = "{{ x._shadow is defined }}{{ x['_shadow'] is defined }}"
    assert compiled(source).render(x=request_text("a")) == "FalseFalse"


def test_shadows_of_random_operations_agree_with_their_text():
    rng = random.Random(5)
    steps = (
        lambda t: t + rng.choice(("<a>", " ", "\n")),
        lambda t: rng.choice(("<a>", " ", "\n")) + t,
        lambda t: template_text(t).strip() if type(t) is str else t.strip(),
        lambda t: template_text("<a>").join(t.split(rng.choice((None, "<", "b", "a>")))),
        lambda t: t[rng.randint(-3, 3) :],
        lambda t: t.replace(rng.choice("<b> "), rng.choice(("<a>", "", "q")), rng.randint(-1, 2)),
        lambda t: t.upper() if rng.random() < 0.1 else t,
        lambda t: template_text("|").join(t.splitlines(rng.random() < 0.5)),
        lambda t: template_text("").join(t.rpartition(rng.choice("<b>"))),
        lambda t: template_text("%s<a>") % t,
    )
    for _ in range(500):
        content = "".join(rng.choices("<ab>c \nü", k=rng.randint(1, 12))).replace("a", "")
        traced = request_text(content)
        state = rng.getstate()
        for _ in range(6):
            traced = rng.choice(steps)(traced)
        rng.setstate(state)
        expected = content
        for _ in range(6):
            expected = str.__str__(rng.choice(steps)(expected))
        assert traced == expected
        shadow = shadow_of(traced)
        assert len(shadow) == len(expected)
        assert all(m in (BLANK, c) for m, c in zip(shadow, expected, strict=True))
        # The request has no "a": each is the template's.
        assert shadow.count("a") + shadow.count("A") == expected.count("a") + expected.count("A")
