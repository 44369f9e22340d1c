"""What the top-level `.git` asks for, and which settings of git run a program."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vectora_jail.gitprotect import _RUNS, ConfigEntry, GitFacts, parse_config, protect, runs_program

ROOT = Path(__file__).resolve().parents[2]
W = b"/home/u/w"
REPO = b"/home/u/r/.git"


def entries(text: bytes) -> list[tuple[bytes, bytes, bytes | None]]:
    return [(e.name, e.subsection, e.value) for e in parse_config(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"[core]\n\tpager = less # x\n", [(b"core.pager", b"", b"less")]),
        (b'[Remote "A b"] URL="x y" ; z\n', [(b"remote.url", b"A b", b"x y")]),
        (b"[filter.lfs]\nclean = a \\\n b\n", [(b"filter.clean", b"lfs", b"a  b")]),
        (b'[filter "a]\\"b"]\nsmudge=x', [(b"filter.smudge", b'a]"b', b"x")]),
        (b"[core]\nbare\n", [(b"core.bare", b"", None)]),
        (b"\xef\xbb\xbf[core]\r\n\tbare = true\r\n", [(b"core.bare", b"", b"true")]),
        (b"garbage\n[core\n=\n", []),
    ],
)
def test_parse_config(text, expected):
    """Assert that settings are read as git reads them: quotes, comments, continued lines, subsections."""
    assert entries(text) == expected


value = st.text('ab !"#;\\\t=[]', max_size=10)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.tuples(st.sampled_from(["core.pager", "filter.a b.clean", "alias.x"]), value), max_size=4
    )
)
def test_parse_config_reads_what_git_writes(tmp_path_factory, values):
    """Assert that every value that git itself writes into a file is read back the same."""
    if not shutil.which("git"):
        pytest.skip("no git")
    path = tmp_path_factory.mktemp("config") / "config"
    path.touch()
    for name, text in values:
        subprocess.run(["git", "config", "-f", path, "--add", name, text], check=True, timeout=10)
    got = [(e.full_name, e.value) for e in parse_config(path.read_bytes())]
    assert sorted(got) == sorted((n.encode(), v.encode()) for n, v in values)


@given(st.binary(max_size=200) | st.text('[]"\\=\n #a.', max_size=60).map(str.encode))
def test_parse_config_survives_anything(text):
    """Assert that no bytes make the reader fail or loop."""
    assert all(e.name.count(b".") for e in parse_config(text))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (b"core.fsmonitor", b"/tmp/x", True),
        (b"core.fsmonitor", b"true", False),
        (b"alias.x", b"!sh", True),
        (b"alias.x", b"status", False),
        (b"include.path", b"../x", True),
        (b"pager.log", b"false", False),
        (b"remote.url", b"https://example.org", False),
        (b"remote.url", b"ext::sh", True),
        (b"user.name", b"x", False),
    ],
)
def test_runs_program(name, text, expected):
    """Assert that settings that run programs are told from those that do not."""
    assert runs_program(ConfigEntry(name, b"", text)) is expected


def test_both_lists_of_settings_are_the_same():
    """Assert that the shim looks for exactly the settings that the pure part knows."""
    source = (ROOT / "csrc/core/gitconfig.c").read_text(encoding="utf-8")
    table = source[source.index("RUNS[] = {") : source.index("};", source.index("RUNS[] = {"))]
    assert set(re.findall(r'"([a-z.]+)"', table)) == {name.decode() for name in _RUNS}


def test_an_ordinary_repository():
    """Assert that `.git` is read-only by default, and narrowed to what runs code at the level config."""
    facts = GitFacts(W, "dir", gitdir=W + b"/.git")
    plan = protect(facts, level="read-only", roots=[W])
    assert (plan.grants, plan.protected, plan.pins) == ((), (W + b"/.git",), ())
    plan = protect(facts, level="config", roots=[W])
    assert W + b"/.git" in plan.pins
    assert {W + b"/.git/hooks", W + b"/.git/info", W + b"/.git/config"} <= set(plan.protected)
    assert protect(facts, level="off", roots=[W]).protected == ()
    assert protect(GitFacts(W), level="config", roots=[W]).protected == ()


def test_bc_11_a_worktree_needs_the_common_directory():
    """Assert that a linked worktree gets the common directory it names, its pointer file protected (BC-11)."""
    facts = GitFacts(W, "file", gitdir=REPO + b"/worktrees/w", common=REPO, back=W + b"/.git")
    plan = protect(facts, level="read-only", roots=[W])
    assert plan.grants == (REPO,)
    assert set(plan.protected) == {W + b"/.git", REPO, REPO + b"/worktrees/w"}
    plan = protect(facts, level="config", roots=[W])
    assert {REPO + b"/config", REPO + b"/worktrees/w/commondir"} <= set(plan.protected)
    assert REPO + b"/worktrees" in plan.pins


@pytest.mark.parametrize(
    "changes",
    [{"back": b""}, {"back": b"/home/u/other/.git"}, {"complete": False}, {"gitdir": b"/etc", "back": b""}],
)
def test_bc_93_a_pointer_that_is_not_answered_grants_nothing(changes):
    """Assert that a pointer file that an agent wrote widens nothing (BC-93)."""
    known = {"gitdir": REPO + b"/worktrees/w", "common": REPO, "back": W + b"/.git", **changes}
    plan = protect(GitFacts(W, "file", **known), level="read-only", roots=[W])
    assert plan.grants == ()
    assert plan.protected == (W + b"/.git",)
    assert plan.hazards[0][0] == "git_foreign"


def test_a_submodule_names_its_work_tree():
    """Assert that a submodule's git directory is granted when its config names this work tree back."""
    facts = GitFacts(W, "file", gitdir=REPO + b"/modules/w", back=W)
    assert protect(facts, level="read-only", roots=[W]).grants == (REPO + b"/modules/w",)


def test_links_and_hooks_path():
    """Assert that a linked `.git`, linked hooks and `core.hooksPath` inside the grant are protected where they lead."""
    facts = GitFacts(
        W, "symlink", gitdir=W + b"/real", hooks=W + b"/tools/hooks", config=b"[core]\nhooksPath = .husky/_\n"
    )
    plan = protect(facts, level="read-only", roots=[W])
    assert set(plan.protected) == {W + b"/real", W + b"/tools/hooks", W + b"/.husky/_"}
    assert {W + b"/tools", W + b"/.husky"} <= set(plan.pins)
    assert {kind for kind, _ in plan.hazards} == {"git_symlink", "git_exec"}
