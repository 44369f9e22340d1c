"""`vectora.toml` → policy: disabled, valid or refused; a refusal says file, line, key, found and expected."""

from __future__ import annotations

import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vectora_jail.policy import DEFAULT_MASK, Ceiling, Policy
from vectora_jail.policyfile import (
    load_policy,
    parse_policy,
    parse_policy_text,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = """
[sandbox]
enabled = true
backend = "local"                # local | docker | ssh | modal
level = "workspace-write"        # read-only | workspace-write | danger-full-access
read = "restricted"
rw_paths = ["."]
ro_paths = []
mask = [".env", "**/*.pem", "**/.ssh/**", "**/.aws/**"]
protect = []
protect_git = "read-only"        # read-only | config | off
mask_add = []                    # appended to mask
no_gpu = true
lockdown = false
idle_timeout_s = 300

[sandbox.env]
pass = ["CI"]
set = { PYTHONDONTWRITEBYTECODE = "1" }

[sandbox.network]
mode = "none"
allow = ["pypi.org:443", "*.npmjs.org:443", "localhost:5432"]
deny = ["telemetry.npmjs.org"]
hosts = { "db.test" = "10.0.0.5" }
strict_sni = true
unix = []

[sandbox.limits]
preset = "moderate"
memory_mb = 2048
pids = 256
disk_mb = 4096
cpu_s = 300
wall_s = 600
cpus = 2

[sandbox.seccomp]
deny = []
allow = []

[sandbox.docker]
image = "python:3.13-slim"
[sandbox.ssh]
host = "user@host:22"
[sandbox.modal]
app = "vectora"
image = "python:3.13-slim"
"""

PAGE_CEILING = Ceiling(private_addresses=True, remote_hosts=("user@host",), modal_apps=("vectora",))


def problems_of(text, **options):
    policy = parse_policy_text(text, **options)
    assert policy.refused, policy
    assert policy.enabled, "a refused policy must never look disabled"
    return [str(problem) for problem in policy.problems]


# --- opt-in


def test_no_file_is_disabled(tmp_path):
    """Assert that a workspace without vectora.toml behaves as if the package did not exist."""
    policy = load_policy(tmp_path)
    assert (policy.enabled, policy.refused, policy.reason) == (False, False, "no_vectora_toml")


def test_no_workspace_is_no_file(tmp_path):
    """Assert that a path below nothing, or below a file, has no policy."""
    assert parse_policy(tmp_path / "gone" / "vectora.toml").reason == "no_vectora_toml"
    (tmp_path / "file").touch()
    assert parse_policy(tmp_path / "file" / "vectora.toml").reason == "no_vectora_toml"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# [sandbox]\n",
        "[agent]\nauto_commit = true\n",
        'x = """\n[sandbox]\n"""\n',
        "[agent.sandbox]\na = 1\n",
    ],
)
def test_no_sandbox_key_is_disabled(text):
    """Assert that a file without a `sandbox` key is disabled, also when a string speaks of one."""
    policy = parse_policy_text(text)
    assert (policy.enabled, policy.reason) == (False, "no_sandbox_table")


def test_enabled_false_is_disabled_and_keeps_its_values():
    """Assert that `enabled = false` disables, and that an explicit request finds the file's values."""
    policy = parse_policy_text('[sandbox]\nenabled = false\nlevel = "read-only"\n')
    assert (policy.enabled, policy.reason) == (False, "sandbox_disabled_in_config")
    assert policy.with_(enabled=True).level == "read-only"


@pytest.mark.parametrize(
    "text", ["[sandbox]\n", "sandbox = {}\n", "[sandbox.limits]\n", "sandbox.enabled = true\n"]
)
def test_a_sandbox_table_enables(text):
    """Assert that any spelling of a `sandbox` table enables, with the defaults."""
    policy = parse_policy_text(text)
    assert policy.enabled
    assert policy.with_(ceiling=None) == Policy()


def test_the_page_of_the_documentation_is_valid():
    """Assert that the documented example parses as it stands under a ceiling that consents to it."""
    policy = parse_policy_text(PAGE, ceiling=PAGE_CEILING)
    assert not policy.refused, policy.problems
    assert policy.env.pass_ == ("CI",)
    assert policy.network.allow == ("pypi.org:443", "*.npmjs.org:443", "localhost:5432")
    assert policy.limit_values.cpus == 2
    assert policy.ssh.target == ("user", "host", 22)


def test_crlf_is_as_good_as_lf():
    """Assert that a file with CRLF line ends gives the same policy and the same lines."""
    assert parse_policy_text(PAGE.replace("\n", "\r\n"), ceiling=PAGE_CEILING) == parse_policy_text(
        PAGE, ceiling=PAGE_CEILING
    )
    assert problems_of("[sandbox]\r\n\r\nmasks = []\r\n")[0].startswith("vectora.toml:3: masks:")


# --- refused: what a text can do wrong


@pytest.mark.parametrize(
    ("text", "start", "parts"),
    [
        ("[sandbox]\nenabled =\n", "vectora.toml:2: found text that does not parse", ["expected TOML 1.0"]),
        ("x = [\n[sandbox]\n", "vectora.toml:", ["does not parse"]),
        ("sandbox = {\n", "vectora.toml:", ["does not parse"]),
        ("sandbox.enabled = tru\n", "vectora.toml:1:", ["does not parse"]),
        ("[sandbox]\na = 1\na = 2\n", "vectora.toml:3:", ["does not parse"]),
        (b"[sandbox]\nx = '\xff'\n", "vectora.toml:2: found the byte 0xff", ["expected UTF-8"]),
        ("\ufeff[sandbox]\n", "vectora.toml:1: found a byte order mark", ["without BOM"]),
        ("[sandbox]\n".encode("utf-16"), "vectora.toml:1: found the byte 0xff", ["UTF-8"]),
        (b"\xfe\xff" + "[sandbox]\n".encode("utf-16-be"), "vectora.toml:1: found the byte 0xfe", ["UTF-8"]),
        (
            "[[sandbox]]\n",
            "vectora.toml:1: sandbox: found a list",
            ["expected one table", "one pair of brackets"],
        ),
        (
            'a = 1\nsandbox = "yes"\n',
            'vectora.toml:2: sandbox: found "yes" (a string)',
            ["expected one table"],
        ),
        ("sandbox = true\n", "vectora.toml:1: sandbox: found true", ["expected one table"]),
        (
            "[sandbxo]\n",
            'vectora.toml:1: sandbxo: found "sandbxo"',
            ['expected "sandbox"', "did you mean [sandbox]?"],
        ),
        ("[Sandbox]\n", "vectora.toml:1: Sandbox:", ["did you mean [sandbox]?"]),
        ("[sand-box]\n", "vectora.toml:1: sand-box:", ["did you mean [sandbox]?"]),
        ("[sandbox]\n[sandbxo.network]\n", "vectora.toml:2: sandbxo:", ["did you mean [sandbox]?"]),
        ("[sandbxo]\nx =\n", "vectora.toml:2:", ["does not parse"]),
        ("[sandbox]\nmasks = []\n", "vectora.toml:2: masks: found an unknown key", ['did you mean "mask"?']),
        ("[sandbox]\nrw_path = []\n", "vectora.toml:2: rw_path: found an unknown key", ['"rw_paths"?']),
        ("[sandbox.netwrk]\n", "vectora.toml:1: netwrk:", ['did you mean "network"?']),
        (
            "[sandbox.network]\nmod = 1\n",
            "vectora.toml:2: network.mod:",
            ['did you mean "mode"?', "[sandbox.network]"],
        ),
        ("[sandbox]\nmemory_mb = 1\n", "vectora.toml:2: memory_mb:", ["[sandbox.limits]"]),
        (
            "[sandbox]\nlimits = 1\n",
            "vectora.toml:2: limits: found 1 (an integer)",
            ["a table [sandbox.limits]"],
        ),
        ("[sandbox]\nenabled = 1\n", "vectora.toml:2: enabled: found 1", ["expected true or false"]),
        (
            '[sandbox]\nenabled = "false"\n',
            'vectora.toml:2: enabled: found "false" (a string)',
            ["without quotes"],
        ),
        ('[sandbox]\nrw_paths = "x"\n', 'vectora.toml:2: rw_paths: found "x" (a string)', ['write ["x"]']),
        ("[sandbox]\nrw_paths = 42\n", "vectora.toml:2: rw_paths: found 42", ["expected a list of paths"]),
        (
            "[sandbox]\nmask = true\n",
            "vectora.toml:2: mask: found true",
            ["expected a list of gitignore patterns"],
        ),
        ("[sandbox]\ndocker_image = 123\n", "vectora.toml:2: docker_image: found 123", ["expected a string"]),
        (
            '[sandbox]\nbackend = "Docker"\n',
            'vectora.toml:2: backend: found "Docker"',
            ['did you mean "docker"?'],
        ),
        ('[sandbox]\nrw_paths = ["a\\u0000b"]\n', "vectora.toml:2: rw_paths[0]:", ["NUL"]),
        (
            '[sandbox]\nrw_paths = [\n  ".",\n  "$HOME",\n]\n',
            "vectora.toml:4: rw_paths[1]:",
            ["dollar is $$"],
        ),
        (
            '[sandbox]\nrw_paths = ["x"]\nro_paths = ["./x"]\n',
            "vectora.toml:2: rw_paths[0]:",
            ["also in ro_paths"],
        ),
        ('[sandbox]\nrw_paths = ["/"]\n', "vectora.toml:2: rw_paths[0]:", ["the whole file system"]),
        (
            "[sandbox]\nenabled = false\nlockdown = true\n",
            "vectora.toml:2: enabled:",
            ["because lockdown = true"],
        ),
        (
            '[sandbox]\ndocker_image = "a"\ndocker.image = "b"\n',
            "vectora.toml:3: docker.image:",
            ["two spellings"],
        ),
        (
            "[sandbox]\nidle_timeout_s = 2024-01-01\n",
            "vectora.toml:2: idle_timeout_s:",
            ["a value of type date"],
        ),
        (
            "[sandbox]\n[sandbox.network.hosts]\n'a.b' = '1.1.1.1'\n'c.d' = 'e'\n",
            "vectora.toml:4:",
            ["hosts.c.d"],
        ),
        ('[sandbox]\n"ena\\u0062led" = 1\n', "vectora.toml:2: enabled:", ["found 1"]),
    ],
)
def test_refused_with_file_line_key_found_and_expected(text, start, parts):
    """Assert that a wrong file is refused with one message that names everything."""
    (message,) = problems_of(text)
    assert message.startswith(start)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("text", ["x = [\n", "[agent\n", b"x = '\xff'\n", "a = 1\na = 2\n", "\ufeffx = 1\n"])
def test_a_broken_file_that_does_not_speak_of_a_sandbox_is_disabled(text):
    """Assert that somebody else's broken file stays somebody else's."""
    assert parse_policy_text(text).reason == "no_sandbox_table"


@pytest.mark.parametrize(
    "line",
    [
        "[sandbox]",
        "  [sandbox.env]",
        "[[sandbox]]",
        "[ sandbox ]",
        "sandbox=1",
        "sandbox . x = 1",
        '["sandbox"]',
    ],
)
def test_a_broken_file_that_speaks_of_a_sandbox_is_refused(line):
    """Assert that every spelling of a sandbox in a broken file refuses."""
    assert parse_policy_text(f"x = [\n{line}\n").refused
    assert parse_policy_text(f"{line}\n=\n".encode() + b"\xff").refused


def test_all_problems_come_in_the_order_of_the_file():
    """Assert that every problem is reported at once, in order of lines."""
    messages = problems_of(
        '[sandbox]\nlevel = "x"\nfoo = 1\n[sandbox.limits]\npids = -1\n[sandbox.ssh]\nport = 0\n'
    )
    assert [message.split(":")[1] for message in messages] == ["2", "3", "5", "7"]


def test_flat_aliases_are_the_same_settings():
    """Assert that docker_image, remote_host and ssh_key_id set what their tables set."""
    ceiling = Ceiling(backends=("local", "ssh"), remote_hosts=("u@h",))
    policy = parse_policy_text(
        '[sandbox]\ndocker_image = "a:1"\nremote_host = "u@h"\nssh_key_id = "k"\n', ceiling=ceiling
    )
    assert (policy.docker.image, policy.ssh.host, policy.ssh.key) == ("a:1", "u@h", "k")
    (message,) = problems_of('[sandbox]\n\nremote_host = "u@h"\n')
    assert message.startswith("vectora.toml:3: remote_host:")


@pytest.mark.parametrize(
    "text",
    [
        "[sandbox]\n" + ".".join(["a"] * 100_000) + " = 1\n",
        "[" + ".".join(["sandbox"] * 100_000) + "]\n",
        "sandbox = " + "[" * 200_000,
        "sandbox = " + "{a=" * 100_000,
        "[sandbox]\nx = " + "9" * 500_000 + "\n",
        '[sandbox]\nx = """' + "\\\\" * 250_000,
        "[sandbox]\nx = '" + "'" * 400_000,
        "[sandbox]\n" + "a" * 1_000_000,
        "[sandbox]\nrw_paths = [" + '"a",' * 200_000 + "]\n",
        "[sandbox]\n" + "[" * 1_000_000,
        "\n" * 900_000 + "[sandbox]\nx\n",
        "[sandbox]\n" + '"' * 1_000_000,
    ],
)
def test_a_hostile_file_is_refused_in_bounded_time(text):
    """Assert that no text of a megabyte takes more than seconds or ends in anything but a refusal."""
    begin = time.monotonic()
    assert parse_policy_text(text).refused
    assert time.monotonic() - begin < 5


FRAGMENTS = st.sampled_from(
    [
        "[sandbox]\n",
        "[sandbox",
        "[[sandbox]]\n",
        "sandbox",
        " = ",
        ".",
        "enabled",
        "true",
        "false",
        '"',
        "'",
        '"""',
        "\n",
        "[",
        "]",
        "{",
        "}",
        ",",
        "rw_paths",
        '["."]',
        '"."',
        "\\",
        "#",
        "network",
        "mode",
        '"none"',
        "\ufeff",
        "1",
        "-",
        "\r\n",
        "\0",
        "[sandbox.network]\n",
        "[sandbxo]\n",
        "mask",
        '[".env"]',
        " ",
        "enabled = false\n",
        "lockdown = true\n",
        "limits.pids = 3\n",
        "\ud7ff",
        "é",
    ]
)


@settings(max_examples=600, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(FRAGMENTS, max_size=25).map("".join)))
@example("[sandbox]\nenabled = false\n")
@example("[sandbox]\n[sandbox.env.set]\n")
@example('x = """\n[sandbox]\nenabled = true"""')
def test_any_text_is_disabled_valid_or_refused(text):
    """Assert that no text raises, and that a `[sandbox` line is never disabled unless TOML itself says so."""
    policy = parse_policy_text(text)
    assert isinstance(policy, Policy)
    assert policy.refused == bool(policy.problems)
    assert all(problem.found and problem.file for problem in policy.problems)
    assert len(policy.digest) == 64
    if any(line.lstrip().startswith("[sandbox") for line in text.split("\n")) and not policy.enabled:
        document = tomllib.loads(text)  # does not raise: a broken one would have been refused
        assert "sandbox" not in document or document["sandbox"]["enabled"] is False


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_disabled_valid_or_refused(data):
    """Assert that no bytes raise."""
    assert parse_policy_text(b"[sandbox]\n#" + data).enabled
    parse_policy_text(data)


def test_the_floor_of_masks_stays_whatever_the_file_says():
    """Assert that neither `mask = []` nor `!` takes a pattern of the floor away."""
    policy = parse_policy_text('[sandbox]\nmask = ["!.env"]\n')
    floor = [entry.pattern for entry in policy.mask_entries if entry.floor]
    assert tuple(floor) == DEFAULT_MASK
