"""The key table, walked: every key refuses wrong types, and is free to ask for or names its ceiling field."""

from __future__ import annotations

import dataclasses

import pytest

from vectora_jail import policydocs
from vectora_jail.errors import PolicyError
from vectora_jail.policy import Ceiling, Policy
from vectora_jail.policyfile import parse_policy_text
from vectora_jail.policykeys import CEILING_KEYS, FLAT_ALIASES, KEYS, TABLES, key_named
from vectora_jail.policyrules import exceeds, path_consented, resolved_excess
from vectora_jail.policytext import lexical_path

BY_KIND = {
    "bool": "bool",
    "int": "int",
    "number": "number",
    "choice": "str",
    "text": "str",
    "name": "str",
    "path": "str",
    "sshhost": "str",
    "paths": "list",
    "masks": "list",
    "globs": "list",
    "names": "list",
    "choices": "list",
    "envnames": "list",
    "rules": "list",
    "vars": "table",
    "hosts": "table",
}
VALUES = {
    "bool": ["true", "false"],
    "int": ["77", "-1"],
    "number": ["1.5"],
    "float": ["0.5", "nan", "inf"],
    "str": ["'x'", "''", '"true"', '"300"'],
    "list": ["[]", "['x']"],
    "table": ["{}", "{a = 'x'}"],
    "date": ["2024-01-01", "12:00:00", "2024-01-01T00:00:00Z"],
}
FITS = {"number": {"int", "number", "float"}, "int": {"int"}, "bool": {"bool"}}
WRONG = [
    (key, value)
    for key in KEYS
    for kind, values in VALUES.items()
    if kind not in FITS.get(BY_KIND[key.kind], {BY_KIND[key.kind]})
    for value in values
]
# What a file may not say under the default ceiling, by ceiling field: (text, key of the problem).
REQUESTS = {
    "backends": ("[sandbox]\nbackend = 'docker'", "backend"),
    "level": ("[sandbox]\nlevel = 'danger-full-access'", "level"),
    "outside_paths": ("[sandbox]\nrw_paths = ['.', '/srv/x']", "rw_paths[1]"),
    "git": ("[sandbox]\nprotect_git = 'config'", "protect_git"),
    "env_pass": ("[sandbox.env]\npass = ['AWS_SECRET']", "env.pass[0]"),
    "network": ("[sandbox.network]\nmode = 'host'", "network.mode"),
    "private_addresses": ("[sandbox.network]\nallow = ['10.0.0.1:5432']", "network.allow[0]"),
    "unix_sockets": ("[sandbox.network]\nunix = ['/var/run/docker.sock']", "network.unix[0]"),
    "limits": ("[sandbox.limits]\npreset = 'unlimited'", "limits.preset"),
    "seccomp_allow": ("[sandbox.seccomp]\nallow = ['ptrace']", "seccomp.allow[0]"),
    "images": ("[sandbox.docker]\npull = 'missing'", "docker.pull"),
    "docker_hosts": ("[sandbox.docker]\nhost = 'tcp://h:2376'", "docker.host"),
    "docker_helper": ("[sandbox.docker]\nhelper = true", "docker.helper"),
    "docker_seccomp": ("[sandbox.docker]\nseccomp = 'unconfined'", "docker.seccomp"),
    "docker_volumes": ("[sandbox.docker]\nvolume = 'v'", "docker.volume"),
    "remote_hosts": ("[sandbox.ssh]\nhost = 'evil@x'", "ssh.host"),
    "ssh_isolation": ("[sandbox.ssh]\nisolation = 'host'", "ssh.isolation"),
    "modal_apps": ("[sandbox.modal]\napp = 'a'", "modal.app"),
    "modal_volumes": ("[sandbox.modal]\nvolume = 'v'", "modal.volume"),
    "modal_secrets": ("[sandbox.modal]\nsecrets = ['s']", "modal.secrets[0]"),
}
# The same for one more key of each field that bounds several.
MORE = [
    ("[sandbox]\nro_paths = ['..']", "ro_paths[0]", "outside_paths"),
    ("[sandbox]\nro_paths = ['~/.cargo']", "ro_paths[0]", "outside_paths"),
    ("[sandbox]\nro_paths = ['a/../../b']", "ro_paths[0]", "outside_paths"),
    ("[sandbox]\nread = 'all'", "read", "outside_paths"),
    ("[sandbox.network]\nallow = ['127.0.0.1:80']", "network.allow[0]", "private_addresses"),
    ("[sandbox.network]\nallow = ['169.254.169.254']", "network.allow[0]", "private_addresses"),
    ("[sandbox.network]\nallow = ['192.168.0.0/16']", "network.allow[0]", "private_addresses"),
    ("[sandbox.network]\nhosts = { 'db.test' = '10.0.0.5' }", "network.hosts.db.test", "private_addresses"),
    ("[sandbox.limits]\nmemory_mb = 8193", "limits.memory_mb", "limits"),
    ("[sandbox.limits]\npids = 1025", "limits.pids", "limits"),
    ("[sandbox.limits]\ndisk_mb = 16385", "limits.disk_mb", "limits"),
    ("[sandbox.limits]\nwall_s = 3601", "limits.wall_s", "limits"),
    ("[sandbox.modal]\nmemory_mb = 8193", "modal.memory_mb", "limits"),
    ("[sandbox.ssh]\nuser = 'root'", "ssh.user", "remote_hosts"),
    ("[sandbox.ssh]\nport = 23", "ssh.port", "remote_hosts"),
    ("[sandbox.modal]\nenvironment = 'prod'", "modal.environment", "modal_apps"),
    ("[sandbox]\nremote_host = 'evil@x'", "remote_host", "remote_hosts"),
    ("[sandbox]\nlevel = 'danger-full-access'", "level", "level"),
]
FREE = """
[sandbox]
enabled = true
protect = ["/anything", "~/.bashrc"]
mask = []
mask_add = ["!.env"]
lockdown = false
no_gpu = false
idle_timeout_s = 5
env.pass = ["CI", "NO_COLOR", "EDITOR"]
env.set = { LD_PRELOAD = "x.so" }
network.mode = "allowlist"
network.allow = ["pypi.org", "localhost:5432", "1.1.1.1:53"]
network.deny = ["10.0.0.0/8"]
network.strict_sni = false
limits.preset = "generous"
limits.cpu_s = 600000
limits.cpus = 64
seccomp.deny = ["socket"]
ssh.path = "/srv/x"
ssh.key = "deploy"
ssh.sync = "both"
ssh.keepalive_s = 5
modal.image = "x:1"
modal.apt = ["git"]
modal.pip = ["x==1"]
modal.cpu = 4
modal.region = "eu"
modal.timeout_s = 60
modal.idle_timeout_s = 60
modal.sync = "push"
"""


def assign(key, value):
    return f"[sandbox{'.' * bool(key.table)}{key.table}]\n\n{key.leaf} = {value}\n"


@pytest.mark.parametrize(("key", "value"), WRONG, ids=lambda item: getattr(item, "name", item))
def test_every_key_refuses_every_wrong_type(key, value):
    """Assert that a value of another type refuses the file and names line, key, found and expected."""
    policy = parse_policy_text(assign(key, value))
    assert policy.refused
    (problem,) = policy.problems
    assert problem.key.startswith(key.name)
    assert (problem.line, problem.file) == (3, "vectora.toml")
    assert problem.found
    assert problem.expected


@pytest.mark.parametrize("key", [key for key in KEYS if key.high], ids=lambda key: key.name)
def test_every_number_has_bounds(key):
    """Assert that a number just outside its range is refused and its bounds are not."""
    for value in (key.low - 1, key.high + 1, -(2**63)):
        policy = parse_policy_text(assign(key, int(value) if key.kind == "int" else float(value)))
        assert key.expected in policy.problems[0].expected
    for value in (key.low, key.high):
        policy = parse_policy_text(
            assign(key, value), ceiling=Ceiling(limits="unlimited", remote_hosts=("*",))
        )
        assert not policy.refused, policy.problems


@pytest.mark.parametrize("key", [key for key in KEYS if key.choices], ids=lambda key: key.name)
def test_every_choice_names_its_values(key):
    """Assert that a value that is no choice is refused with the whole list, and a near one is suggested."""
    policy = parse_policy_text(assign(key, f"'{key.choices[-1].upper()}'"))
    assert all(choice in policy.problems[0].expected for choice in key.choices)
    assert f'did you mean "{key.choices[-1]}"?' in policy.problems[0].hint


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_misspelt_key_is_refused_with_a_suggestion(key):
    """Assert that a key with a letter too many is unknown, and that the right one is suggested."""
    policy = parse_policy_text(assign(key._replace(name=key.name + "x"), "1"))
    assert policy.refused
    assert "an unknown key" in policy.problems[0].found
    assert f'"{key.leaf}"' in policy.problems[0].hint or "did you mean" in policy.problems[0].hint


def test_every_key_is_a_field_and_every_field_a_key():
    """Assert that the table and the classes have the same names, with a default and a sentence each."""
    policy = Policy()
    for table in TABLES:
        names = {field.name for field in dataclasses.fields(getattr(policy, table))}
        assert names == {key.attr for key in KEYS if key.table == table}
    internal = {"ceiling", "refused", "problems", "source", "reason", "identity", "_digest", *TABLES}
    assert {field.name for field in dataclasses.fields(policy)} - internal == {
        key.attr for key in KEYS if not key.table
    }
    assert {field.name for field in dataclasses.fields(Ceiling)} == {key.name for key in CEILING_KEYS}
    assert len({key.name for key in KEYS}) == len(KEYS)
    for key in (*KEYS, *CEILING_KEYS):
        assert key.doc.endswith((".", ").")), key
        assert key.expected
    assert all(key_named(name) for name in FLAT_ALIASES.values())


def test_every_ceiling_field_is_asked_for_or_held_elsewhere():
    """Assert that each bounded key names a ceiling field, and each field has a request here or a reason."""
    fields = {field.name for field in dataclasses.fields(Ceiling)}
    named = {key.ceiling for key in KEYS if key.ceiling}
    assert named <= fields
    # the floor is held silently, the others are read by the plan and by approval
    elsewhere = {
        "mask_floor",
        "gpu",
        "sensitive_exceptions",
        "weak_isolation",
        "unsandboxed",
        "outside_ro_paths",
    }
    assert set(REQUESTS) | elsewhere == fields
    assert named - {"mask_floor", "gpu"} == set(REQUESTS)


@pytest.mark.parametrize(
    ("text", "key", "field"),
    [(text, key, field) for field, (text, key) in REQUESTS.items()] + MORE,
)
def test_what_exceeds_the_ceiling_names_the_missing_consent(text, key, field):
    """Assert that a request beyond the default ceiling is refused, naming the ceiling's field."""
    policy = parse_policy_text(text)
    assert policy.refused
    problem = next(problem for problem in policy.problems if problem.ceiling == field)
    assert problem.key == key
    assert problem.line == 2
    assert f"the ceiling's `{field}` does not consent" in str(problem)


def test_what_is_free_needs_no_consent():
    """Assert that everything free to ask for is granted under the default ceiling."""
    policy = parse_policy_text(FREE)
    assert not policy.refused, policy.problems


def test_gpu_is_bounded_when_the_ceiling_says_so():
    """Assert that `gpu=False` refuses `no_gpu = false` and a Modal GPU."""
    for text in ("[sandbox]\nno_gpu = false", "[sandbox]\nno_gpu = false\nmodal.gpu = 'T4'"):
        assert not parse_policy_text(text).refused
        problems = parse_policy_text(text, ceiling=Ceiling(gpu=False)).problems
        assert {problem.ceiling for problem in problems} == {"gpu"}


@pytest.mark.parametrize(
    ("text", "ceiling"),
    [
        ("[sandbox]\nbackend = 'docker'", {"backends": ("docker",)}),
        ("[sandbox]\nbackend = 'docker'\n[sandbox.docker]\nimage = 'a:1'", {"backends": ("docker",)}),
        ("[sandbox]\nrw_paths = ['/srv/x/y']", {"outside_paths": ("/srv/x",)}),
        ("[sandbox]\nro_paths = ['/srv/x/y']", {"outside_ro_paths": ("/srv/x",)}),
        ("[sandbox]\nro_paths = ['~/.cargo/registry']", {"outside_paths": ("~/.cargo",)}),
        ("[sandbox]\nread = 'all'", {"outside_ro_paths": ("/",)}),
        ("[sandbox]\nlevel = 'danger-full-access'", {"level": "danger-full-access"}),
        ("[sandbox]\nlevel = 'read-only'\nrw_paths = ['/x']", {"outside_ro_paths": ("/x",)}),
        ("[sandbox.env]\npass = ['AWS_REGION', 'MY_*']", {"env_pass": ("AWS_*", "MY_*")}),
        ("[sandbox.env]\npass = ['MY_A*']", {"env_pass": ("MY_*",)}),
        ("[sandbox.seccomp]\nallow = ['ptrace']", {"seccomp_allow": ("*",)}),
        ("[sandbox.network]\nunix = ['/run/x.sock']", {"unix_sockets": ("/run/./x.sock",)}),
        ("[sandbox.network]\nallow = ['10.0.0.1']", {"private_addresses": True}),
        ("[sandbox.limits]\nwall_s = 100000", {"limits": "unlimited"}),
        ("[sandbox.docker]\nimage = 'a:1'\npull = 'missing'", {"images": ("a:*",)}),
        ("[sandbox.ssh]\nhost = 'u@h'", {"remote_hosts": ("u@h",)}),
        ("[sandbox.ssh]\nhost = 'u@h:22'", {"remote_hosts": ("u@h",)}),
        ("[sandbox.ssh]\nhost = 'h'\nuser = 'u'\nport = 23", {"remote_hosts": ("u@H:23",)}),
        ("[sandbox.ssh]\nhost = '[fd00::1]:23'", {"remote_hosts": ("[fd00::1]:23",)}),
        ("[sandbox.ssh]\nhost = 'u@h.corp:2222'", {"remote_hosts": ("*@*.corp:*",)}),
        ("[sandbox.modal]\napp = 'a'\nenvironment = 'dev'", {"modal_apps": ("dev/a",)}),
    ],
)
def test_a_consent_permits(text, ceiling):
    """Assert that the named consent is enough."""
    policy = parse_policy_text(text, ceiling=Ceiling(**ceiling))
    assert not policy.refused, policy.problems


@pytest.mark.parametrize(
    ("text", "ceiling"),
    [
        ("[sandbox]\nrw_paths = ['/srv/xy']", {"outside_paths": ("/srv/x",)}),
        ("[sandbox]\nrw_paths = ['/srv/x/../y']", {"outside_paths": ("/srv/x",)}),
        ("[sandbox]\nrw_paths = ['/srv/x']", {"outside_ro_paths": ("/srv/x",)}),
        ("[sandbox]\nread = 'all'", {"outside_paths": ("/srv",)}),
        ("[sandbox.env]\npass = ['A*']", {"env_pass": ("A?",)}),
        ("[sandbox.env]\npass = ['*']", {"env_pass": ("A*",)}),
        ("[sandbox.ssh]\nhost = 'root@h'", {"remote_hosts": ("h",)}),
        ("[sandbox.ssh]\nhost = 'u@h:23'", {"remote_hosts": ("u@h",)}),
        ("[sandbox.ssh]\nhost = 'h'", {"remote_hosts": ("u@h",)}),
        ("[sandbox]\nbackend = 'docker'", {"backends": ("docker",), "images": ("a:1",)}),
        ("[sandbox.docker]\nimage = 'b'\npull = 'missing'", {"images": ("a",)}),
        ("[sandbox.modal]\napp = 'a'\nenvironment = 'dev'", {"modal_apps": ("a",)}),
        ("[sandbox]\nlevel = 'danger-full-access'\nnetwork.unix = ['/s']", {}),
        ("[sandbox]\nbackend = 'local'", {"backends": ("docker",)}),
    ],
)
def test_a_consent_permits_no_more(text, ceiling):
    """Assert that a consent covers what it names and nothing beside it."""
    policy = parse_policy_text(text, ceiling=Ceiling(**ceiling))
    assert policy.refused
    assert all(problem.ceiling for problem in policy.problems)


def test_a_default_never_exceeds_a_narrow_ceiling():
    """Assert that a file which asks for nothing is lowered to the ceiling instead of being refused."""
    ceiling = Ceiling(level="read-only", limits="conservative", network="none", ssh_isolation="bwrap")
    policy = parse_policy_text("[sandbox]\n", ceiling=ceiling)
    assert not policy.refused, policy.problems
    assert (policy.level, policy.preset, policy.ssh.isolation) == ("read-only", "conservative", "bwrap")
    assert parse_policy_text("[sandbox]\nlevel = 'workspace-write'", ceiling=ceiling).refused
    assert parse_policy_text("[sandbox.limits]\npreset = 'moderate'", ceiling=ceiling).refused
    assert parse_policy_text("[sandbox.network]\nmode = 'allowlist'", ceiling=ceiling).refused


def test_an_absolute_path_of_the_workspace_is_inside_it():
    """Assert that the workspace's own absolute spelling needs no consent once the workspace is known."""
    text = "[sandbox]\nrw_paths = ['/srv/ws/src', 'src/../lib', '../ws/x']"
    assert parse_policy_text(text).refused
    assert not parse_policy_text(text, workspace="/srv/ws").refused
    assert parse_policy_text(text, workspace="/srv/w").refused


def test_exceeds_takes_the_home_that_it_is_given():
    """Assert that `~` in policy and ceiling means the given home directory."""
    policy = Policy(rw_paths=("~/a",))
    assert not exceeds(policy, Ceiling(outside_paths=("/home/u",)), workspace="/w", home="/home/u")
    assert exceeds(policy, Ceiling(outside_paths=("/home/v",)), workspace="/w", home="/home/u")
    assert not exceeds(policy, Ceiling(), workspace="/home/u", home="/home/u")
    assert path_consented("/a/b", ["/a"], workspace="/w", home="/h")
    assert not path_consented("/ab", ["/a"], workspace="/w", home="/h")
    assert lexical_path("//a/./b/../c", "/w", "/h") == "/a/c"
    assert lexical_path("a$$b", "/w", "/h") == "/w/a$b"
    assert lexical_path("~", "/w", "/h") == "/h"


def test_a_link_out_of_the_workspace_needs_the_same_consent():
    """Assert that a grant is judged again by where its links lead; a consented path may be a link itself."""

    def refused(key, path, real=None, **ceiling):
        found = resolved_excess(
            Ceiling(**ceiling), [(key, b"/w/link", path)], workspace=b"/w", home=b"/h", real=real
        )
        assert all(problem.ceiling and '"/w/link"' in problem.found for problem in found)
        return bool(found)

    assert not refused("rw_paths", b"/w/src")
    assert refused("rw_paths", b"/etc")
    assert refused("rw_paths", b"/w/../etc")
    assert refused("rw_paths", b"/etc", outside_ro_paths=("/etc",))
    assert not refused("ro_paths", b"/etc", outside_ro_paths=("/etc",))
    assert not refused("rw_paths", b"/h/.cargo/x", outside_paths=("~/.cargo",))
    assert refused("rw_paths", b"/data/cargo/x", outside_paths=("~/.cargo",))
    assert not refused(
        "rw_paths", b"/data/cargo/x", {b"/h/.cargo": b"/data/cargo"}, outside_paths=("~/.cargo",)
    )
    assert refused("network.unix", b"/w/sock")
    assert not refused("network.unix", b"/run/s", unix_sockets=("/run/s",))


def test_init_writes_a_valid_policy_with_every_local_key():
    """Assert that the text of `init` is the default policy, and valid with every line switched on."""
    text = policydocs.init_text()
    assert parse_policy_text(text).with_(ceiling=None) == Policy()
    lines = [line[2:] if line.startswith("# ") and _is_toml(line[2:]) else line for line in text.splitlines()]
    policy = parse_policy_text("\n".join(lines))
    assert not policy.refused, policy.problems
    for key in KEYS:
        if key.table not in ("docker", "ssh", "modal"):
            assert any(line.startswith(f"{key.leaf} = ") for line in lines), key.name


def _is_toml(line):
    return line.startswith("[sandbox") or (" = " in line and line.split(" = ")[0].replace("_", "").isalnum())


def test_the_reference_names_every_key_and_field():
    """Assert that the generated reference has every key with its consent, every field and every preset."""
    text = policydocs.reference()
    for key in KEYS:
        assert f"| `{key.leaf}` |" in text
    for key in CEILING_KEYS:
        assert f"| `{key.name}` |" in text
    assert "| generous | 8192 | 1024 | 16384 | none | 3600 |" in text


def test_a_wrong_policy_of_a_caller_is_no_ceiling_problem():
    """Assert that what a caller builds is not bounded by a ceiling."""
    Policy(rw_paths=("/srv/x",), level="danger-full-access", backend="docker", protect_git="off")
    with pytest.raises(PolicyError):
        Policy(backend="dcker")
