"""The one builder of the environment that commands get: cleared, then rebuilt from a list of names.

An allowlist by name: a backend's secrets are never looked at, neither their values nor their shape. Values
of names that are taken over are paths that exist inside, or harmless by their kind.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vectora_jail.facts import HostFacts
    from vectora_jail.policy import Policy

__all__ = ["CERTIFICATE_VARIABLES", "Environment", "build_environment", "select_environ"]

_BASE = (b"TERM", b"LANG", b"LANGUAGE", b"TZ")
# fmt: off
_PATH_VARIABLES = (
    b"PYENV_ROOT", b"PIPX_HOME", b"CONDA_PREFIX", b"PIXI_HOME", b"RYE_HOME", b"RUSTUP_HOME",
    b"CARGO_HOME", b"GOROOT", b"GOPATH", b"NVM_DIR", b"VOLTA_HOME", b"FNM_DIR", b"N_PREFIX",
    b"NODENV_ROOT", b"PNPM_HOME", b"BUN_INSTALL", b"DENO_INSTALL", b"RBENV_ROOT", b"rvm_path",
    b"GEM_HOME", b"SDKMAN_DIR", b"JENV_ROOT", b"ASDF_DATA_DIR", b"MISE_DATA_DIR", b"GOENV_ROOT",
    b"OPAMROOT", b"ELAN_HOME", b"DOTNET_ROOT", b"PERL_LOCAL_LIB_ROOT", b"JAVA_HOME", b"ANDROID_HOME",
    b"VIRTUAL_ENV", b"MAVEN_HOME", b"M2_HOME", b"GRADLE_HOME", b"CUDA_HOME", b"LOCPATH",
    b"LOCALE_ARCHIVE", b"TERMINFO", b"TZDIR",
)
"""Taken over where the path they name shows inside."""

# fmt: on
_TOOL_SETTINGS = (
    b"PYENV_VERSION",
    b"RUSTUP_TOOLCHAIN",
    b"NVM_BIN",
    b"CONDA_DEFAULT_ENV",
    b"GOTOOLCHAIN",
    b"GOFLAGS",
)
"""Which version of a tool is meant; taken over as they are."""

CERTIFICATE_VARIABLES = (
    b"SSL_CERT_FILE",
    b"SSL_CERT_DIR",
    b"NODE_EXTRA_CA_CERTS",
    b"REQUESTS_CA_BUNDLE",
    b"CURL_CA_BUNDLE",
    b"GIT_SSL_CAINFO",
    b"PIP_CERT",
    b"NIX_SSL_CERT_FILE",
    b"AWS_CA_BUNDLE",
    b"HTTPLIB2_CA_CERTS",
    b"CARGO_HTTP_CAINFO",
    b"DENO_CERT",
    b"CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
    b"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)
_GPU_OFF = (
    b"CUDA_VISIBLE_DEVICES",
    b"NVIDIA_VISIBLE_DEVICES",
    b"HIP_VISIBLE_DEVICES",
    b"ROCR_VISIBLE_DEVICES",
)
_OWN = b"VECTORA_SANDBOX_"
SYSTEM_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VALUE_MAX = 32 * 1024


class Environment(NamedTuple):
    """What a command gets, and the names of what it does not."""

    variables: tuple[bytes, ...]
    """Sorted `NAME=value`."""
    dropped: tuple[str, ...]
    """Names of the backend's variables that are not taken over; their values are nowhere."""


def _wanted(name: bytes, patterns: Iterable[str]) -> bool:
    if name in _BASE or name.startswith(b"LC_") or name in (b"PATH", b"HOME", b"SHELL"):
        return True
    if name in _PATH_VARIABLES or name in _TOOL_SETTINGS or name in CERTIFICATE_VARIABLES:
        return True
    return _passed(name, patterns)


def _passed(name: bytes, patterns: Iterable[str]) -> bool:
    text = name.decode("utf-8", "surrogateescape")
    return any(fnmatchcase(text, pattern) for pattern in patterns)


def select_environ(environ: Mapping[bytes, bytes], policy: Policy) -> dict[bytes, bytes]:
    """Return the variables that `build_environment` may look at; all others stay with the backend."""
    return {
        name: value
        for name, value in environ.items()
        if name and b"=" not in name and len(value) <= _VALUE_MAX and _wanted(name, policy.env.pass_)
    }


def build_environment(
    policy: Policy,
    facts: HostFacts,
    *,
    visible: Callable[[bytes], bool],
    home: bytes,
    sandbox_type: str = "local",
    network_off: bool = True,
    writable: Iterable[bytes] = (),
    extra: Mapping[str, str] | None = None,
    tmpdir: bytes = b"/tmp",
) -> Environment:
    """Return the environment of every command of a jail.

    Args:
        policy: `[sandbox.env]`, the level and the GPU switch.
        facts: The backend's variables, the user, the time zone, whether a repository lies above.
        visible: Whether something shows inside at an absolute path.
        home: `$HOME` inside.
        sandbox_type: `local`, `docker`, `ssh`, `modal` or `seatbelt`, for the marker.
        network_off: Whether there is no network at all.
        writable: The writable grants, for the marker.
        extra: What other layers need (proxies); beats the backend's, not `[sandbox.env] set`.
        tmpdir: Where temporary files go.
    """
    environ = dict(facts.environ)
    user = facts.user
    out: dict[bytes, bytes] = {b"LANG": b"C.UTF-8", b"TERM": b"dumb"}
    minimal = policy.lockdown
    for name, value in environ.items():
        if name in _BASE or name.startswith(b"LC_"):
            out[name] = value
        elif minimal:
            continue
        elif name in _PATH_VARIABLES or name in CERTIFICATE_VARIABLES:
            if value.startswith(b"/") and visible(value.split(b":")[0]):
                out[name] = value
        elif name in _TOOL_SETTINGS:
            out[name] = value
    if facts.timezone:
        out.setdefault(b"TZ", facts.timezone)
    out[b"PATH"] = _path(b"" if minimal else environ.get(b"PATH", b""), visible)
    out[b"HOME"] = home
    out[b"USER"] = out[b"LOGNAME"] = user.name.encode()
    out[b"SHELL"] = user.shell if visible(user.shell) else b"/bin/sh"
    for name in (b"TMPDIR", b"TEMP", b"TMP"):
        out[name] = tmpdir
    out[b"XDG_RUNTIME_DIR"] = b"/run/user/%d" % user.uid
    if facts.parent_repository is not None or facts.repository:
        out[b"GIT_DISCOVERY_ACROSS_FILESYSTEM"] = b"1"
    if facts.workspace.uid != user.uid:
        # git refuses repositories of others, and outside the jail rightly so
        out[b"GIT_CONFIG_COUNT"] = b"1"
        out[b"GIT_CONFIG_KEY_0"] = b"safe.directory"
        out[b"GIT_CONFIG_VALUE_0"] = facts.workspace.path
    if policy.no_gpu:
        out.update(dict.fromkeys(_GPU_OFF, b""))
        out[b"NVIDIA_VISIBLE_DEVICES"] = b"void"
    for key, text in (extra or {}).items():
        out[key.encode()] = text.encode("utf-8", "surrogateescape")
    if not minimal:
        asked = {n: v for n, v in environ.items() if n not in _FIXED and _passed(n, policy.env.pass_)}
        out.update(asked)
    for key, text in policy.env.set.items():
        out[key.encode("utf-8", "surrogateescape")] = text.encode("utf-8", "surrogateescape")
    out = {
        name: value for name, value in out.items() if not name.startswith(_OWN) and b"\0" not in name + value
    }
    out.update(_markers(sandbox_type, network_off=network_off, writable=writable))
    dropped = sorted(name for name in facts.environ_names if name not in out)
    return Environment(
        tuple(sorted(b"%s=%s" % pair for pair in out.items())),
        tuple(name.decode("utf-8", "backslashreplace") for name in dropped),
    )


_FIXED = frozenset(
    (b"HOME", b"USER", b"LOGNAME", b"PATH", b"SHELL", b"TMPDIR", b"TEMP", b"TMP", b"XDG_RUNTIME_DIR")
)
"""What a jail decides itself; `pass` cannot bring the host's back, `set` can name another."""


def _path(path: bytes, visible: Callable[[bytes], bool]) -> bytes:
    """Return PATH without what does not show inside, and without relative directories."""
    names: dict[bytes, None] = {}
    for name in (*path.split(b":"), *SYSTEM_PATH.split(b":")):
        if name.startswith(b"/") and visible(name):
            names.setdefault(name.rstrip(b"/") or b"/")
    return b":".join(names) or SYSTEM_PATH


def _markers(sandbox_type: str, *, network_off: bool, writable: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return what tells programs that they are inside, and where they may write."""
    markers = {
        _OWN + b"ACTIVE": b"1",
        _OWN + b"TYPE": sandbox_type.encode(),
        _OWN + b"WRITABLE_ROOTS": b":".join(sorted(writable)),
    }
    if network_off:
        markers[_OWN + b"NETWORK_DISABLED"] = b"1"
    return markers
