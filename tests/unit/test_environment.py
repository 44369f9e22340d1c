"""The environment of commands: rebuilt from names, nothing of the backend's leaks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.host import HOME, WORKSPACE, host, path
from vectora_jail.environment import build_environment, select_environ
from vectora_jail.facts import HostFacts, PathFact
from vectora_jail.policy import EnvPolicy, Policy

SECRETS = {
    b"AWS_SECRET_ACCESS_KEY": b"s3cr3t-aws",
    b"GITHUB_TOKEN": b"s3cr3t-gh",
    b"SSH_AUTH_SOCK": b"/run/s3cr3t-agent",
    b"LD_PRELOAD": b"/s3cr3t.so",
    b"PYTHONPATH": b"/s3cr3t",
    b"NODE_OPTIONS": b"--require=/s3cr3t",
    b"BASH_ENV": b"/s3cr3t",
    b"DATABASE_URL": b"postgres://u:s3cr3t@h/d",
    b"DBUS_SESSION_BUS_ADDRESS": b"unix:path=/s3cr3t",
}


def facts_of(environ: dict[bytes, bytes], policy: Policy, **changes: object) -> HostFacts:
    """Return a host whose backend has this environment."""
    return host(
        environ=tuple(sorted(select_environ(environ, policy).items())),
        environ_names=tuple(sorted(environ)),
        **changes,
    )


def build(environ: dict[bytes, bytes], policy: Policy | None = None, **keywords: object):
    """Return (variables as a dict, names that were dropped)."""
    policy = policy or Policy()
    changes = keywords.pop("facts", {})
    facts = facts_of(environ, policy, **changes)
    there = keywords.pop("there", (b"/usr", b"/bin", HOME + b"/.pyenv", b"/etc/ssl"))
    made = build_environment(
        policy,
        facts,
        visible=lambda p: any(p == top or p.startswith(top + b"/") for top in there),
        home=HOME,
        **keywords,
    )
    return dict(pair.split(b"=", 1) for pair in made.variables), made.dropped


def test_secrets_are_dropped_by_name_and_their_values_are_nowhere():
    """Assert that what nobody asked for is listed by name, with no trace of its value in facts or plan."""
    out, dropped = build(SECRETS)
    assert set(dropped) == {name.decode() for name in SECRETS}
    assert b"s3cr3t" not in b"".join(out.values())
    facts = facts_of(SECRETS, Policy())
    assert b"s3cr3t" not in repr(facts.environ).encode()
    assert "s3cr3t" not in repr(facts)


def test_basis():
    """Assert that every command finds its user, home, shell, language, time zone and temporary directory."""
    out, _ = build({b"TERM": b"xterm", b"LC_TIME": b"de_DE.UTF-8"})
    assert out[b"HOME"] == HOME
    assert out[b"USER"] == out[b"LOGNAME"] == b"u"
    assert out[b"SHELL"] == b"/bin/bash"
    assert out[b"TMPDIR"] == out[b"TMP"] == out[b"TEMP"] == b"/tmp"
    assert out[b"LANG"] == b"C.UTF-8"
    assert out[b"LC_TIME"] == b"de_DE.UTF-8"
    assert out[b"TZ"] == b"Europe/Berlin"
    assert out[b"TERM"] == b"xterm"


def test_path_names_only_what_is_there():
    """Assert that PATH loses what does not show, relative names and doubles, and keeps the order."""
    value = b":".join((HOME + b"/.pyenv/shims", b".", b"", b"bin", b"/opt/x/bin", b"/usr/bin/", b"/usr/bin"))
    out, _ = build({b"PATH": value})
    names = out[b"PATH"].split(b":")
    assert names[:2] == [HOME + b"/.pyenv/shims", b"/usr/bin"]
    assert all(name.startswith(b"/") for name in names)
    assert b"/opt/x/bin" not in names
    assert len(names) == len(set(names))


def test_tool_homes_only_where_they_show():
    """Assert that a variable which names a hidden directory is not set."""
    out, _ = build(
        {b"PYENV_ROOT": HOME + b"/.pyenv", b"CARGO_HOME": HOME + b"/.cargo", b"GOPATH": b"relative"}
    )
    assert out[b"PYENV_ROOT"] == HOME + b"/.pyenv"
    assert b"CARGO_HOME" not in out
    assert b"GOPATH" not in out


def test_certificates_pass_where_their_file_shows():
    """Assert that programs find the same certificates as outside (BC-47)."""
    out, _ = build({b"SSL_CERT_FILE": b"/etc/ssl/certs/ca.crt", b"NODE_EXTRA_CA_CERTS": b"/srv/hidden.crt"})
    assert out[b"SSL_CERT_FILE"] == b"/etc/ssl/certs/ca.crt"
    assert b"NODE_EXTRA_CA_CERTS" not in out


def test_pass_and_set():
    """Assert that `pass` takes names and globs over, and `set` beats everything but the markers."""
    policy = Policy(env=EnvPolicy(pass_=("CI", "MY_*"), set={"X": "2", "LANG": "C"}))
    out, dropped = build({b"CI": b"1", b"MY_A": b"a", b"OTHER": b"x", b"LANG": b"de_DE.UTF-8"}, policy)
    assert (out[b"CI"], out[b"X"], out[b"MY_A"], out[b"LANG"]) == (b"1", b"2", b"a", b"C")
    assert dropped == ("OTHER",)


def test_pass_cannot_bring_back_what_the_jail_decides():
    """Assert that HOME, PATH and TMPDIR of the host stay outside, whatever `pass` says."""
    policy = Policy(env=EnvPolicy(pass_=("*",)))
    out, _ = build({b"HOME": b"/host", b"TMPDIR": b"/host/tmp", b"PATH": b"/host/bin"}, policy)
    assert out[b"HOME"] == HOME
    assert out[b"TMPDIR"] == b"/tmp"
    assert b"/host" not in out[b"PATH"]


def test_markers():
    """Assert that programs can tell where they are, and that nobody can forge it from outside."""
    forged = {b"VECTORA_SANDBOX_ACTIVE": b"0", b"VECTORA_SANDBOX_X": b"1"}
    out, _ = build(forged, Policy(env=EnvPolicy(pass_=("*",))), writable=(b"/b", b"/a"))
    assert out[b"VECTORA_SANDBOX_ACTIVE"] == b"1"
    assert out[b"VECTORA_SANDBOX_TYPE"] == b"local"
    assert out[b"VECTORA_SANDBOX_NETWORK_DISABLED"] == b"1"
    assert out[b"VECTORA_SANDBOX_WRITABLE_ROOTS"] == b"/a:/b"
    assert b"VECTORA_SANDBOX_X" not in out
    assert b"VECTORA_SANDBOX_NETWORK_DISABLED" not in build({}, network_off=False)[0]


def test_lockdown_is_minimal():
    """Assert that lockdown takes over neither tools nor passed names."""
    policy = Policy(lockdown=True, env=EnvPolicy(pass_=("CI",)))
    out, _ = build({b"CI": b"1", b"PYENV_ROOT": HOME + b"/.pyenv", b"PATH": HOME + b"/.pyenv/shims"}, policy)
    assert b"CI" not in out
    assert b"PYENV_ROOT" not in out
    assert HOME not in out[b"PATH"]


def test_gpu_is_hidden_by_name_too():
    """Assert that no_gpu blanks the variables which would name a device (BC-57)."""
    assert build({})[0][b"CUDA_VISIBLE_DEVICES"] == b""
    assert b"CUDA_VISIBLE_DEVICES" not in build({}, Policy(no_gpu=False))[0]


def test_a_repository_above_can_be_found():
    """Assert that git looks across the mount where a parent's or a worktree's git directory is bound."""
    name = b"GIT_DISCOVERY_ACROSS_FILESYSTEM"
    assert name not in build({})[0]
    assert build({}, facts={"parent_repository": path(HOME + b"/src/.git")})[0][name] == b"1"


def test_git_takes_a_workspace_of_somebody_else():
    """Assert that git inside accepts the workspace whoever owns it, by a variable and no file (BC-79)."""
    assert b"GIT_CONFIG_COUNT" not in build({})[0]
    other = PathFact(WORKSPACE, WORKSPACE, "dir", uid=7)
    out, _ = build({}, facts={"workspace": other})
    assert (out[b"GIT_CONFIG_KEY_0"], out[b"GIT_CONFIG_VALUE_0"]) == (b"safe.directory", WORKSPACE)


def test_proxies_come_from_the_network_layer():
    """Assert that what the network needs is set, and beaten only by `[sandbox.env] set`."""
    out, _ = build({b"http_proxy": b"http://host:1"}, extra={"http_proxy": "http://127.0.0.1:3128"})
    assert out[b"http_proxy"] == b"http://127.0.0.1:3128"


NAMES = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="="), min_size=1, max_size=20
)


@settings(max_examples=80, deadline=None)
@given(
    st.dictionaries(
        NAMES.map(str.encode), st.binary(max_size=40).filter(lambda v: b"\0" not in v), max_size=8
    )
)
def test_every_name_is_taken_over_or_listed(environ):
    """Assert that each variable of the backend is inside or in the list of dropped names, and never both."""
    out, dropped = build(environ)
    for name in environ:
        assert (name in out) != (name.decode() in dropped)
