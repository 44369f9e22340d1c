"""Policy values: what holds for a level, what contradicts itself; values are frozen, equal and hashable."""

from __future__ import annotations

import dataclasses
import pathlib
import pickle

import pytest

from vectora_jail.errors import PolicyError, SandboxDisabled
from vectora_jail.policy import (
    DEFAULT_MASK,
    LIMIT_PRESETS,
    SENSITIVE_PATHS,
    Ceiling,
    DockerPolicy,
    EnvPolicy,
    Limits,
    LimitValues,
    MaskEntry,
    ModalPolicy,
    Network,
    Policy,
    SeccompPolicy,
    SshPolicy,
)


def keys_of(error):
    return [problem.key for problem in error.value.problems]


def test_a_policy_of_the_caller_is_enabled_with_the_defaults_of_the_page():
    """Assert the documented defaults."""
    policy = Policy()
    assert policy.enabled
    assert not policy.refused
    assert (policy.backend, policy.level, policy.read) == ("local", "workspace-write", "restricted")
    assert (policy.rw_paths, policy.ro_paths, policy.mask) == ((".",), (), DEFAULT_MASK)
    assert (policy.protect_git, policy.no_gpu, policy.lockdown) == ("read-only", True, False)
    assert (policy.network.mode, policy.idle_timeout_s, policy.preset) == ("none", 300, "moderate")
    assert policy.ceiling is None


def test_policies_are_frozen_equal_hashable_and_pickle():
    """Assert that a policy is a value: no assignment, equality by content, a hash, a way through pickle."""
    make = lambda: Policy(env=EnvPolicy(set={"A": "1"}), network=Network(hosts={"a.example": "1.1.1.1"}))  # noqa: E731
    one, two = make(), make()
    assert one == two
    assert hash(one) == hash(two)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.level = "read-only"
    with pytest.raises(TypeError):
        one.env.set["B"] = "2"


def test_lists_paths_and_tables_are_settled():
    """Assert that lists become tuples and path objects and bytes become strings."""
    policy = Policy(rw_paths=[pathlib.Path("src"), b"lib"], env=EnvPolicy(pass_=["CI"], set={"A": "1"}))
    assert policy.rw_paths == ("src", "lib")
    assert policy.env.pass_ == ("CI",)
    assert dict(policy.env.set) == {"A": "1"}


def test_digest_is_stable_and_sees_every_change():
    """Assert that the digest ignores the file's name and changes with every field that matters."""
    base = Policy()
    assert base.digest == Policy(source="/a/vectora.toml", identity=(1, 2)).digest
    assert len(base.digest) == 64
    others = [
        base.with_(mask_add=("*.key",)),
        base.with_(level="read-only"),
        base.with_(ceiling=Ceiling()),
        base.with_(ceiling=Ceiling(mask_floor=())),
        base.with_(limits=Limits(pids=3)),
        base.with_(env=EnvPolicy(set={"A": "1"})),
        base.with_(network=Network(mode="allowlist")),
        Policy(enabled=False),
    ]
    digests = {policy.digest for policy in (base, *others)}
    assert len(digests) == len(others) + 1
    # a digest that moves with a release restarts every worker once; with the interpreter, never
    assert Policy().digest == "4a3750a2dfbec07230bf73dc9e1a41812d67019ac76f84863e888aadd5577584"


def test_several_problems_come_together():
    """Assert that a wrong policy names every wrong value, not only the first."""
    with pytest.raises(PolicyError) as error:
        Policy(enabled="false", level="rw", rw_paths="x", network={"mode": "none"})
    assert set(keys_of(error)) == {"enabled", "level", "rw_paths", "network"}
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("make", "key", "text"),
    [
        (lambda: Policy(enabled=1), "enabled", "found 1 (an integer); expected true or false (write true)"),
        (lambda: Policy(idle_timeout_s=0), "idle_timeout_s", "expected an integer from 1 to 604800"),
        (lambda: Policy(idle_timeout_s=True), "idle_timeout_s", "found true"),
        (lambda: Policy(idle_timeout_s=1.5), "idle_timeout_s", "found 1.5 (a float)"),
        (lambda: Policy(backend="seatbelt"), "backend", 'on macOS backend = "local" selects Seatbelt'),
        (lambda: Policy(backend="Docker"), "backend", 'did you mean "docker"?'),
        (lambda: Policy(rw_paths=("a\0b",)), "rw_paths[0]", "with a NUL"),
        (lambda: Policy(rw_paths=("",)), "rw_paths[0]", '"." is the workspace'),
        (lambda: Policy(rw_paths=("$HOME/x",)), "rw_paths[0]", "a literal dollar is $$"),
        (lambda: Policy(rw_paths=("~root/x",)), "rw_paths[0]", "only the own home directory"),
        (lambda: Policy(rw_paths=("/",)), "rw_paths[0]", 'level = "danger-full-access"'),
        (lambda: Policy(ro_paths=("/..",)), "ro_paths[0]", 'read = "all"'),
        (lambda: Policy(ro_paths=("/proc/1",)), "ro_paths[0]", "the host's own /proc"),
        (lambda: Policy(rw_paths=("/sys/fs",)), "rw_paths[0]", "the host's own /sys"),
        (lambda: Policy(rw_paths=("n" * 256,)), "rw_paths[0]", "255 a name"),
        (lambda: Policy(rw_paths=("d/" * 2100,)), "rw_paths[0]", "4095 bytes"),
        (lambda: Policy(mask=("$HOME/.ssh",)), "mask[0]", "a pattern without variables"),
        (lambda: Policy(mask=("a[",)), "mask[0]", "a gitignore pattern that can match"),
        (lambda: Policy(mask_add=("/",)), "mask_add[0]", "a gitignore pattern that can match"),
        (lambda: EnvPolicy(pass_=("A=B",)), "env.pass[0]", "no spaces, no ="),
        (
            lambda: EnvPolicy(set={"VECTORA_SANDBOX_TYPE": "x"}),
            "env.set.VECTORA_SANDBOX_TYPE",
            "set by the jail",
        ),
        (lambda: EnvPolicy(set={"A": 1}), "env.set.A", "found 1 (an integer); expected a string"),
        (lambda: EnvPolicy(set={"A": "\0"}), "env.set.A", "NUL"),
        (lambda: Network(allow=("https://a.b/c",)), "network.allow[0]", 'write "a.b"'),
        (lambda: Network(allow=("*",)), "network.allow[0]", 'mode = "host"'),
        (lambda: Network(allow=("a.b:0",)), "network.allow[0]", "port"),
        (lambda: Network(hosts={"a.b": "c.d"}), "network.hosts.a.b", "pinned to an address"),
        (lambda: Limits(memory_mb=0), "limits.memory_mb", 'preset = "unlimited" lifts limits'),
        (lambda: Limits(cpus=float("nan")), "limits.cpus", "expected a number"),
        (lambda: Limits(pids=10**30), "limits.pids", "expected an integer from 1 to 4194304"),
        (lambda: Limits(pids=10**5000), "limits.pids", "an integer of many digits"),
        (lambda: SeccompPolicy(deny=("no space",)), "seccomp.deny[0]", "expected a name"),
        (lambda: DockerPolicy(image="--privileged"), "docker.image", "does not begin with -"),
        (lambda: DockerPolicy(tls_dir="certs"), "docker.tls_dir", "a path that begins with / or ~/"),
        (lambda: SshPolicy(host="-oProxyCommand=x"), "ssh.host", "not a name or an address"),
        (lambda: SshPolicy(host="a b"), "ssh.host", "not a name or an address"),
        (lambda: SshPolicy(host="h:99999"), "ssh.host", "from 1 to 65535"),
        (lambda: SshPolicy(key="~/.ssh/id"), "ssh.key", "never a path"),
        (lambda: ModalPolicy(timeout_s=5), "modal.timeout_s", "an integer from 10 to 86400"),
    ],
)
def test_a_wrong_value_says_what_to_write(make, key, text):
    """Assert that a wrong value is refused with its key, what was found and what is expected."""
    with pytest.raises(PolicyError) as error:
        make()
    assert keys_of(error) == [key]
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("fields", "key", "text"),
    [
        ({"rw_paths": (".", "src/"), "ro_paths": ("./src",)}, "rw_paths[1]", "which is also in ro_paths"),
        ({"ro_paths": (".",)}, "rw_paths[0]", "rw_paths = [] grants none"),
        ({"backend": "ssh"}, "ssh.host", 'because backend = "ssh"'),
        ({"ssh": SshPolicy(host="a@h", user="b")}, "ssh.user", 'expected "a"'),
        ({"ssh": SshPolicy(host="h:23", port=24)}, "ssh.port", "expected 23"),
        ({"modal": ModalPolicy(image="a", image_id="b")}, "modal.image_id", "one of the two"),
        ({"modal": ModalPolicy(gpu="T4")}, "modal.gpu", "no_gpu = true"),
        ({"docker": DockerPolicy(tls_dir="/c")}, "docker.tls_dir", "docker.host beside it"),
        ({"env": EnvPolicy(pass_=("A",), set={"A": "1"})}, "env.set.A", "also in pass"),
        ({"lockdown": True, "enabled": False}, "enabled", "because lockdown = true"),
        ({"lockdown": True, "level": "danger-full-access"}, "level", "under lockdown"),
        ({"lockdown": True, "network": Network(mode="host")}, "network.mode", "under lockdown"),
        ({"lockdown": True, "network": Network(unix=("/s",))}, "network.unix", "under lockdown"),
        ({"lockdown": True, "limits": Limits(preset="unlimited")}, "limits.preset", "under lockdown"),
        ({"lockdown": True, "seccomp": SeccompPolicy(allow=("ptrace",))}, "seccomp.allow", "under lockdown"),
        ({"lockdown": True, "protect_git": "config"}, "protect_git", "under lockdown"),
        (
            {"lockdown": True, "docker": DockerPolicy(seccomp="unconfined")},
            "docker.seccomp",
            "under lockdown",
        ),
        ({"lockdown": True, "ssh": SshPolicy(isolation="host")}, "ssh.isolation", "under lockdown"),
        (
            {"lockdown": True, "ceiling": Ceiling(sensitive_exceptions=("~/.npmrc",))},
            "lockdown",
            "under lockdown",
        ),
    ],
)
def test_contradictions_are_refused(fields, key, text):
    """Assert that valid values which contradict each other are refused."""
    with pytest.raises(PolicyError) as error:
        Policy(**fields)
    assert key in keys_of(error)
    assert text in str(error.value)


def test_order_of_lists_does_not_make_a_conflict():
    """Assert that nested grants are fine in any order: the deepest path decides later."""
    Policy(rw_paths=("src/gen", "."), ro_paths=("src",))
    Policy(rw_paths=(".", "src/gen"), ro_paths=("src",))


@pytest.mark.parametrize(
    ("policy", "preset", "mode"),
    [
        (Policy(), "moderate", "none"),
        (Policy(level="read-only"), "conservative", "none"),
        (Policy(lockdown=True), "conservative", "none"),
        (Policy(level="danger-full-access"), "unlimited", "host"),
        (
            Policy(level="danger-full-access", network=Network(mode="none", strict_sni=False)),
            "unlimited",
            "none",
        ),
        (Policy(lockdown=True, network=Network(mode="allowlist", allow=("a.b",))), "conservative", "none"),
        (Policy(limits=Limits(preset="generous")), "generous", "none"),
        (Policy(network=Network(mode="allowlist")), "moderate", "allowlist"),
        (Policy(level="danger-full-access").with_(level="workspace-write"), "moderate", "none"),
        (Policy().with_(level="danger-full-access"), "unlimited", "host"),
    ],
)
def test_what_a_level_and_lockdown_imply(policy, preset, mode):
    """Assert the limits and the network that hold for each level, with and without lockdown."""
    assert (policy.preset, policy.network.mode) == (preset, mode)


def test_presets_are_the_table_and_keys_override_them():
    """Assert the numbers of the presets, and that a key overrides one number of its preset."""
    assert LIMIT_PRESETS["conservative"] == LimitValues(512, 64, 1024, 60, 120)
    assert LIMIT_PRESETS["moderate"] == LimitValues(2048, 256, 4096, 300, 600)
    assert LIMIT_PRESETS["generous"] == LimitValues(8192, 1024, 16384, 0, 3600)
    assert not any(LIMIT_PRESETS["unlimited"])
    assert Policy(limits=Limits(pids=9, cpus=1.5)).limit_values == LimitValues(2048, 9, 4096, 300, 600, 1.5)


def test_read_only_grants_nothing_for_writing():
    """Assert that at level read-only what could be written can only be read."""
    policy = Policy(level="read-only", ro_paths=("docs",))
    assert policy.write_paths == ()
    assert policy.read_paths == (".", "docs")
    assert Policy().write_paths == (".",)


def test_masks_come_after_the_floor():
    """Assert that the ceiling's floor comes first and is marked, and that `!` becomes a flag."""
    policy = Policy(mask=("a", "!b"), mask_add=("c",), ceiling=Ceiling(mask_floor=(".env",)))
    assert policy.mask_entries == (
        MaskEntry(".env", floor=True),
        MaskEntry("a"),
        MaskEntry("b", negate=True),
        MaskEntry("c"),
    )
    assert [entry.pattern for entry in Policy().mask_entries] == list(DEFAULT_MASK)


def test_only_the_ceiling_opens_a_sensitive_path():
    """Assert that exceptions come from the ceiling, and that the list names what everybody expects."""
    assert Policy().sensitive_exceptions == ()
    assert Policy(ceiling=Ceiling(sensitive_exceptions=("~/.npmrc",))).sensitive_exceptions == ("~/.npmrc",)
    expected = (
        ".ssh .aws .config/gcloud .kube .docker .npmrc .pypirc .gnupg .cargo/credentials .netrc "
        ".git-credentials "
        ".azure .config/gh .config/op .vault-token .password-store .local/share/keyrings .bash_history"
    )
    assert set(expected.split()) <= set(SENSITIVE_PATHS)
    assert not any(path.startswith(("/", "~")) for path in SENSITIVE_PATHS)


def test_ssh_target_combines_its_keys():
    """Assert that user and port come from the host or from their own keys."""
    assert SshPolicy(host="a@h:23").target == ("a", "h", 23)
    assert SshPolicy(host="h", user="b", port=24).target == ("b", "h", 24)
    assert SshPolicy(host="[::1]").target == ("", "::1", 22)


def test_a_refused_policy_is_never_taken_for_a_disabled_one():
    """Assert that refused counts as enabled and cannot be used, while disabled leaves the caller its path."""
    refused = Policy.refuse(())
    assert refused.enabled
    with pytest.raises(PolicyError):
        refused.ensure_usable()
    with pytest.raises(SandboxDisabled) as error:
        Policy.disabled("no_vectora_toml").ensure_usable("/ws")
    assert error.value.code == "no_vectora_toml"
    assert Policy().ensure_usable() == Policy()


def test_a_wrong_ceiling_is_refused():
    """Assert that a ceiling checks its own fields."""
    with pytest.raises(PolicyError, match=r"level: found \"rw\""):
        Ceiling(level="rw")
    with pytest.raises(PolicyError, match=r"backends\[1\]: found \"dcker\".*did you mean \"docker\""):
        Ceiling(backends=("local", "dcker"))
    with pytest.raises(PolicyError, match="floor"):
        Ceiling(mask_floor=("!x",))
