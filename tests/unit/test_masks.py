"""Mask rules: the Python oracle, the compiled matcher and git itself give the same answers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from vectora_jail.masks import MaskRule, MaskSet, leaving_of, match_pattern, normalise, split_patterns

ROOT = Path(__file__).resolve().parents[2]
W = b"/home/u/w"
ALPHABET = "ab.A*?[]!-^\\/ é"
patterns = st.text(ALPHABET, min_size=1, max_size=9) | st.lists(
    st.sampled_from(["**", "*", "a", "b", ".a", "a*", "?", "[ab]", "[!a]", "ab", "**a", "\\*"]),
    min_size=1,
    max_size=5,
).map("/".join)
names = st.text("ab.A!-^*[ é", min_size=1, max_size=4).filter(
    lambda n: n not in {".", ".."} and n.strip() == n
)
paths = st.lists(names, min_size=1, max_size=4).map("/".join)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """The compiled matcher behind a line protocol."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("gitignore") / "driver"
    sources = [ROOT / "tests/c/gitignore_driver.c", *sorted((ROOT / "csrc/core").glob("gi[tp]*.c"))]
    command = [compiler, "-std=gnu11", "-O1", "-g", "-I", ROOT / "csrc/core", *sources, "-o", program]
    subprocess.run(command, check=True, timeout=60)
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    with process:  # its exit closes the pipes: the driver ends at end-of-file
        yield process


def ask(process, *lines):
    """Answers of the driver to lines that each give one."""
    process.stdin.write("".join(f"{line}\n" for line in lines))
    process.stdin.flush()
    return [int(process.stdout.readline()) for _ in lines]


def compiled(process, rules, path_list, *, collapse=False, flags=0):
    """Which of the paths (below the workspace) the compiled matcher masks."""
    process.stdin.write("n\n")
    added = [f"r {int(r.negate) + 2 * r.floor} {r.pattern.hex()}" for r in rules]
    assert ask(process, *added, f"c {int(collapse)}") == [0] * (len(added) + 1)
    return [bool(v) for v in ask(process, *(f"m {flags} {p.hex()}" for p in path_list))]


def git_ignores(directory, lines, path_list):
    """What git says of the paths under these exclude lines."""
    (directory / "exclude").write_bytes(b"".join(line + b"\n" for line in lines))
    environment = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": str(directory),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.excludesFile",
        "GIT_CONFIG_VALUE_0": str(directory / "exclude"),
    }
    out = subprocess.run(
        ["git", "-C", directory / "repo", "check-ignore", "--no-index", "--stdin", "-z", "-v", "-n"],
        check=False,
        input=b"\0".join(path_list) + b"\0",
        env=environment,
        capture_output=True,
        timeout=20,
    )
    assert out.returncode in {0, 1}, out.stderr
    fields = out.stdout.split(b"\0")
    verdicts = {}
    for i in range(0, len(fields) - 3, 4):
        pattern = fields[i + 2]
        verdicts[fields[i + 3]] = bool(pattern) and not pattern.startswith(b"!")
    return [verdicts[p] for p in path_list]


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    if not shutil.which("git"):
        pytest.skip("no git")
    where = tmp_path_factory.mktemp("oracle")
    subprocess.run(["git", "init", "-q", where / "repo"], check=True, timeout=20)
    return where


def plain(line: str) -> MaskRule | None:
    """The rule of one exclude line as git reads it, None where it is malformed (git never matches it)."""
    raw = line.encode()
    negate = raw.startswith(b"!")
    raw = raw[1:] if negate else raw
    try:
        match_pattern(raw, b"x", is_dir=True)
    except ValueError:
        return None
    return MaskRule(raw, negate) if raw else None


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ],
)
@given(
    lines=st.lists(st.tuples(st.booleans(), patterns), min_size=1, max_size=4),
    path_list=st.lists(paths, min_size=1, max_size=12, unique=True),
)
@example(lines=[(False, "a**/b")], path_list=["ab", "ax/y/b", "a/b"])
@example(lines=[(False, "**/a/**"), (True, "**/a/b")], path_list=["a/b", "a/c", "b/a/x/y"])
@example(lines=[(False, "[a/b]c")], path_list=["ac", "a/bc"])
@example(lines=[(False, "/a")], path_list=["a", "b/a"])
@example(lines=[(False, "a/"), (True, "a/b")], path_list=["a", "a/b"])
def test_git_oracle_and_compiled_matcher_agree(driver, repository, lines, path_list):
    """Assert that git, the Python oracle and the C matcher mask the same paths for the same rules."""
    texts = [
        ("!" if negate else "") + line
        for negate, line in lines
        # comments and trailing spaces are a matter of exclude files, not of rules; // is our own
        if not line.startswith(("#", "!", "//")) and not line.endswith(" ") and "//" not in line
    ]
    rules = [r for r in map(plain, texts) if r is not None]
    encoded = [p.encode() for p in path_list]
    oracle = MaskSet(tuple(rules), workspace=b"/w")
    expected = [oracle.matches(b"/w/" + p) for p in encoded]
    assert compiled(driver, rules, encoded) == expected
    if all(b".git" not in p.split(b"/") for p in encoded):
        assert git_ignores(repository, [t.encode() for t in texts], encoded) == expected


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=st.lists(st.tuples(patterns, st.booleans(), st.booleans()), min_size=1, max_size=5),
    path_list=st.lists(paths, min_size=1, max_size=8),
    flags=st.sampled_from([0, 1, 2, 3]),
)
def test_floor_and_case_folding_agree(driver, rules, path_list, flags):
    """Assert that the oracle and the C matcher agree on floor rules and in directories that ignore case."""
    checked = [MaskRule(r.pattern, n and not f, f) for p, n, f in rules if (r := plain(p))]
    encoded = [p.encode() for p in path_list]
    oracle = MaskSet(tuple(checked), workspace=b"/w")
    expected = [oracle.matches(b"/w/" + p, is_dir=bool(flags & 1), fold=bool(flags & 2)) for p in encoded]
    assert compiled(driver, checked, encoded, flags=flags) == expected


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=st.lists(st.tuples(patterns, st.booleans(), st.booleans()), min_size=1, max_size=5),
    path_list=st.lists(paths, min_size=1, max_size=8),
)
def test_collapse_never_shows_more(driver, rules, path_list):
    """Assert that covering a directory instead of its content hides at least what the rules hide."""
    checked = [MaskRule(r.pattern, n and not f, f) for p, n, f in rules if (r := plain(p))]
    encoded = [p.encode() for p in path_list]
    strict = compiled(driver, checked, encoded)
    collapsed = compiled(driver, checked, encoded, collapse=True)
    assert all(c or not s for s, c in zip(strict, collapsed, strict=True))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text("a.~#bkswptm1", min_size=1, max_size=10), original=st.text("a.~#b", min_size=1, max_size=4)
)
@example(name=".env.swp", original=".env")
@example(name=".a.b", original="a")
def test_leavings_agree(driver, name, original):
    """Assert that the oracle and the C matcher name the same editors' leavings."""
    (found,) = ask(driver, f"l {name.encode().hex()} {original.encode().hex()}")
    assert bool(found) == (original.encode() in leaving_of(name.encode()))


@pytest.mark.parametrize(
    ("name", "original"),
    [
        (b".env~", b".env"),
        (b"key.pem.~12~", b"key.pem"),
        (b".key.pem.swp", b"key.pem"),
        (b".env.swo", b".env"),
        (b"#.env#", b".env"),
        (b".env.bak", b".env"),
        (b".env.tmp.1234", b".env"),
        (b".key.pem.vj-a1b2", b"key.pem"),
    ],
)
def test_what_editors_leave(name, original):
    """Assert that the usual leavings of vim, emacs, nano, sed and writers by rename are recognised."""
    assert original in leaving_of(name)


def test_example_file_is_no_leaving():
    """Assert that `.env.example` is not taken for a leaving of `.env`."""
    assert b".env" not in leaving_of(b".env.example")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".env", [b".env"]),
        ("./.env", [b"/.env"]),
        ("sub//x", [b"sub/x"]),
        ("a/../b", [b"/b"]),
        ("../x", [b"//home/u/x"]),
        ("/home/u/w/sec/", [b"/sec/"]),
        ("/etc/x", [b"/etc/x", b"//etc/x"]),
        ("~/.netrc", [b"//home/u/.netrc"]),
        ("~/w/k", [b"/k"]),
        (".env  ", [b".env"]),
        ("x\\ ", [b"x\\ "]),
        ("!keep", [b"keep"]),
        ("#x#", [b"#x#"]),
        (b"\xff*", [b"\xff*"]),
    ],
)
def test_normalise(text, expected):
    """Assert that each spelling of a path in a policy becomes the rules that name it."""
    rules = normalise(text, workspace=W, home=b"/home/u")
    assert [r.pattern for r in rules] == expected


def test_workspace_with_glob_characters():
    """Assert that an absolute pattern below a workspace with glob characters is taken literally (BC-53)."""
    (rule,) = normalise(b"/t/q*[x]?/.env", workspace=b"/t/q*[x]?")
    assert rule == MaskRule(b"/.env")
    (home_rule,) = normalise("~/.netrc", workspace=W, home=b"/h/a[b]")
    assert MaskSet((home_rule,), workspace=W).matches(b"/h/a[b]/.netrc")


@pytest.mark.parametrize(
    "text", ["", " ", "!", "/", ".", "./", "a\0b", "[a", "a\\", "[[:nope:]]", "x" * 1025, "~/x"]
)
def test_patterns_that_mean_nothing_are_refused(text):
    """Assert that a mask that could never match is an error and not a silent hole."""
    with pytest.raises(ValueError, match="mask pattern"):
        normalise(text, workspace=W)


def test_floor_beats_negation():
    """Assert that a policy's negation gives back what is above the floor and nothing else."""
    rules = split_patterns([".env"], ["*.key", "!.env", "!pub.key"], workspace=W)
    masks = MaskSet(rules, workspace=W)
    assert masks.matches(W + b"/a/.env")
    assert masks.matches(W + b"/a.key")
    assert not masks.matches(W + b"/pub.key")


def test_refuses_absent_names():
    """Assert that the file API refuses masked names, their leavings and what is below a masked directory."""
    rules = split_patterns([".env", "**/.ssh/**"], ["*.pem", "!ca.pem.bak"], workspace=W)
    masks = MaskSet(rules, (b"/home/u/.netrc",), W)
    refused = [b"/.env", b"/a/.env~", b"/a/.ssh/k/x", b"/k.pem.tmp3", b"/.k.pem.swp"]
    assert all(masks.refuses(W + p) for p in refused)
    assert masks.refuses(b"/home/u/.netrc")
    assert masks.refuses(b"/home/u/.netrc~")
    assert not any(masks.refuses(W + p) for p in [b"/ca.pem.bak", b"/.env.example", b"/a/pem", b"/x~"])


def test_hostile_pattern_is_bounded(driver):
    """Assert that a pattern made to blow up a backtracking matcher answers at once."""
    rule = MaskRule(b"a*" * 200 + b"b")
    path = b"a" * 2000
    assert compiled(driver, [rule], [path]) == [False]
