"""The line scanner beside tomllib: the line of every key of every document that tomllib accepts."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vectora_jail.tomllines import MAX_PARTS, looks_like_sandbox, near_miss, scan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAMES = [
    "sandbox",
    "a",
    "b-1",
    "c_d",
    "9",
    "x.y",
    "",
    "é",
    "quo'te",
    'dou"ble',
    "back\\slash",
    "#",
    "[x]",
    "t\tb",
    "n\nl",
]
TEXTS = [
    "",
    "plain",
    "[sandbox]",
    "a = 1",
    "# no comment",
    "two\nlines\n[x]\n",
    'qu"ote',
    "'single'",
    "back\\",
    '"""',
    "'''",
]


def written_key(draw, name):
    """Write one key part in any form that TOML has for it."""
    forms = [
        '"' + "".join(escaped(ch) for ch in name) + '"',
        '"' + "".join(f"\\u{ord(ch):04x}" for ch in name) + '"',
    ]
    if name and all(ch.isascii() and (ch.isalnum() or ch in "_-") for ch in name):
        forms += [name, name, name]
    if "'" not in name and "\n" not in name:
        forms.append(f"'{name}'")
    return draw(st.sampled_from(forms))


def escaped(ch):
    return {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}.get(ch, ch)


class Writer:
    """Writes a random document and remembers on which line each key went."""

    def __init__(self, draw):
        self.draw = draw
        self.text = ""
        self.lines = {}

    def put(self, text):
        self.text += text

    def line(self):
        return self.text.count("\n") + 1

    def choose(self, *items):
        return self.draw(st.sampled_from(items))

    def blank(self):
        self.put(self.choose("", "", " ", "\t "))

    def gap(self):
        self.put(self.choose("", "\n", " \n\t", ' # a ] comment, "\n', "\r\n"))

    def note(self, path):
        for end in range(1, len(path) + 1):
            self.lines.setdefault(path[:end], self.line())

    def string(self):
        value = self.choose(*TEXTS)
        basic = '"' + "".join(escaped(ch) for ch in value) + '"'
        long = '"""' + self.choose("", "\n") + value.replace("\\", "\\\\").replace('"', '\\"') + '"""'
        forms = [basic, long]
        if "'" not in value and "\n" not in value:
            forms.append(f"'{value}'")
        if "'''" not in value and not value.endswith("'"):
            forms.append(f"'''\n{value}'''")
        self.put(self.choose(*forms, '"""x""\\"""""', "'''y'''''"))

    def value(self, path, depth):
        kind = self.choose("scalar", "string", "string", *(["list", "table"] if depth < 3 else []))
        if kind == "string":
            self.string()
        elif kind == "scalar":
            self.put(
                self.choose(
                    "1", "true", "-3.5e2", "nan", "2024-01-01T10:00:00Z", "2024-01-01 10:00:00", "0xff"
                )
            )
        elif kind == "list":
            self.put("[")
            self.gap()
            for index in range(self.choose(0, 1, 3)):
                self.note((*path, index))
                self.value((*path, index), depth + 1)
                self.gap()
                self.put(",")
                self.gap()
            self.put("]")
        else:
            self.put("{")
            self.blank()
            names = self.draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
            for count, name in enumerate(names):
                self.put(", " if count else "")
                self.note((*path, name))
                self.put(written_key(self.draw, name))
                self.blank()
                self.put("=")
                self.blank()
                self.value((*path, name), depth + 1)
                self.blank()
            self.put("}")

    def end(self):
        self.put(self.choose("\n", " # [sandbox]\n", "\n\n", "\r\n"))

    def document(self):
        used = set()
        for number in range(self.choose(1, 2, 4)):
            header = ()
            if number:
                header = tuple(self.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)))
                if header[0] in used:
                    continue
                used.add(header[0])
                self.blank()
                start = self.line()
                brackets = self.choose(1, 1, 2)
                parts = self.choose(".", " . ").join(written_key(self.draw, part) for part in header)
                for end in range(1, len(header) + 1):
                    self.lines.setdefault(header[:end], start)
                self.put("[" * brackets + self.choose("", " ") + parts + "]" * brackets)
                self.end()
            for name in self.draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True)):
                if not header and name in used:
                    continue
                if not header:
                    used.add(name)
                self.blank()
                path = (*header, name)
                parts = [written_key(self.draw, name)]
                if self.choose(False, True):
                    extra = self.choose(*NAMES)
                    path += (extra,)
                    parts.append(written_key(self.draw, extra))
                self.note(path)
                self.put(self.choose(".", " . ").join(parts))
                self.blank()
                self.put("=")
                self.blank()
                self.value(path, 0)
                self.end()
        return self.text, self.lines


@st.composite
def documents(draw):
    return Writer(draw).document()


def paths(value, path=()):
    """Yield the path of everything in a parsed document; a list of tables counts as its last table."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from paths(item, (*path, name))


@settings(max_examples=500, deadline=None)
@given(documents())
def test_every_key_has_the_line_where_it_was_written(document):
    """Assert that in documents which tomllib accepts, each key and list element has its exact line."""
    text, lines = document
    tomllib.loads(text)
    assert scan(text).lines == lines


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab.=[]{}'\"\\#,\n\r\t 1\u00e9", max_size=120))
def test_whatever_tomllib_accepts_has_lines(text):
    """Assert that no text makes the scanner raise, and that it finds every key of a text that parses."""
    found = scan(text)
    assert all(1 <= line <= text.count("\n") + 1 for line in found.lines.values())
    try:
        document = tomllib.loads(text)
    except ValueError:
        return
    for path in paths(document):
        if not any(isinstance(part, int) for part in path):
            assert path in found.lines, path


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300))
def test_the_scanner_reads_anything(text):
    """Assert that neither the scanner nor the look for a sandbox raises."""
    scan(text)
    assert looks_like_sandbox(text) >= 0


def test_a_parent_stands_in_for_what_has_no_line():
    """Assert that a path without a line of its own gets its nearest parent's, and 0 without any."""
    places = scan("\n[a]\nb = 1\n")
    assert places.line(("a", "b", 3)) == 3
    assert places.line(("a", "z")) == 2
    assert places.line(("z",)) == 0


@pytest.mark.parametrize("text", ["{} = 1", "[{}]", "x = {{ {} = 1 }}"])
def test_keys_that_are_nested_too_deep_are_found(text):
    """Assert that a key of more parts than tomllib handles well is found before tomllib sees it."""
    assert scan(text.format(".".join(["a"] * MAX_PARTS + ["a", "a"]))).deep == 1
    assert scan(text.format(".".join(["a"] * (MAX_PARTS - 2)))).deep == 0


@pytest.mark.parametrize(
    "line",
    [
        "[sandbox]",
        " [sandbox.x]",
        "[[sandbox",
        "\t[ sandbox",
        '["sandbox"]',
        "['sandbox'.x]",
        "sandbox =",
        "sandbox.x = 1",
        '"sandbox"=1',
        "[SANDBOX]",
        "[sandbxo]",
        "\ufeff[sandbox]",
        "[s\0a\0ndbox]",
        '["sandb\\u006fx"]',
        "sandbox\t.x",
    ],
)
def test_lines_that_speak_of_a_sandbox(line):
    """Assert that every spelling of a sandbox is seen in a file that does not parse, on its line."""
    assert looks_like_sandbox(f"x\n\n{line}\n") == 3


@pytest.mark.parametrize(
    "line", ["# [sandbox]", "x = '[sandbox]'", "sandbox", "[agent]", "[agent.sandbox]", "mysandbox = 1", ""]
)
def test_lines_that_do_not(line):
    """Assert that a mention elsewhere is none."""
    assert looks_like_sandbox(line) == 0


def test_near_misses():
    """Assert which top-level names count as a misspelt sandbox."""
    for name in (
        "sandbxo",
        "sanbox",
        "sandox",
        "Sandbox",
        "sand_box",
        "sand-box",
        "sandboxes",
        "sandboxx",
        "snadbox",
    ):
        assert near_miss(name), name
    for name in ("sandbox", "agent", "hooks", "model", "box", "sand", "", "a" * 1000, "toolbox", "inbox"):
        assert not near_miss(name), name
