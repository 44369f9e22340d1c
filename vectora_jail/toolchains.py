"""Find the toolchains that PATH or the user's variables name outside the system directories, and only them.

A directory of PATH is shown with what its links lead to; a known tool home by the parts that a program
reads, never with the file beside them that holds the registry token. What the workspace holds is the
agent's: its links are followed only into homes that are known here.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from vectora_jail.facts import PathFact, ToolHome
from vectora_jail.mounts import below_any, is_below

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

__all__ = ["KNOWN", "Known", "Tools", "find_toolchains"]


class Known(NamedTuple):
    """A tool that keeps itself in the home directory."""

    name: str
    variable: bytes
    """Environment variable that moves it; empty when there is none."""
    places: tuple[bytes, ...]
    """Where it is otherwise, relative to the home directory."""
    parts: tuple[bytes, ...] = (b"",)
    """What is shown of it, relative to its place; empty name: all."""
    cache: tuple[bytes, ...] = ()
    """Shown read-only without a network only: with one, the tool must be able to write there."""


def _known(name: str, variable: str, places: str, parts: str = "", cache: str = "") -> Known:
    split = tuple(part.encode() for part in parts.split()) or (b"",)
    return Known(
        name,
        variable.encode(),
        tuple(places.encode().split()),
        split,
        tuple(part.encode() for part in cache.split()),
    )


KNOWN: tuple[Known, ...] = (
    _known("pyenv", "PYENV_ROOT", ".pyenv"),
    _known("uv", "", ".local/share/uv", "python tools"),
    _known("pipx", "PIPX_HOME", ".local/share/pipx .local/pipx", "venvs shared py"),
    _known("conda", "CONDA_PREFIX", "miniconda3 anaconda3 miniforge3 mambaforge micromamba .conda/envs"),
    _known("pixi", "PIXI_HOME", ".pixi", "bin envs"),
    _known("rye", "RYE_HOME", ".rye", "shims py self tools"),
    _known("poetry", "", ".local/share/pypoetry", "venv"),
    _known("python-user", "", ".local/lib"),
    _known("rustup", "RUSTUP_HOME", ".rustup"),
    _known("cargo", "CARGO_HOME", ".cargo", "bin env config config.toml", "registry git"),
    _known("go", "GOPATH", "go", "bin", "pkg/mod"),
    _known("go-sdk", "", "sdk"),
    _known("nvm", "NVM_DIR", ".nvm"),
    _known("volta", "VOLTA_HOME", ".volta", "bin tools"),
    _known("fnm", "FNM_DIR", ".local/share/fnm .fnm"),
    _known("n", "N_PREFIX", "n", "bin lib n"),
    _known("nodenv", "NODENV_ROOT", ".nodenv"),
    _known("npm-global", "", ".npm-global .npm-packages", "bin lib"),
    _known("pnpm", "PNPM_HOME", ".local/share/pnpm"),
    _known("bun", "BUN_INSTALL", ".bun", "bin"),
    _known("deno", "DENO_INSTALL", ".deno", "bin"),
    _known("rbenv", "RBENV_ROOT", ".rbenv"),
    _known("rvm", "rvm_path", ".rvm"),
    _known("gem", "GEM_HOME", ".gem", "ruby"),
    _known("sdkman", "SDKMAN_DIR", ".sdkman", "candidates bin src"),
    _known("jenv", "JENV_ROOT", ".jenv"),
    _known("jdks", "", ".jdks"),
    _known("asdf", "ASDF_DATA_DIR", ".asdf"),
    _known("mise", "MISE_DATA_DIR", ".local/share/mise", "installs shims plugins"),
    _known("goenv", "GOENV_ROOT", ".goenv"),
    _known("tfenv", "", ".tfenv"),
    _known("ghcup", "", ".ghcup"),
    _known("opam", "OPAMROOT", ".opam"),
    _known("elan", "ELAN_HOME", ".elan"),
    _known("juliaup", "", ".juliaup .julia/juliaup"),
    _known("dotnet", "DOTNET_ROOT", ".dotnet"),
    _known("nix-profile", "", ".local/state/nix/profiles"),
    _known("perl", "PERL_LOCAL_LIB_ROOT", "perl5"),
    _known("composer", "", ".config/composer .composer", "vendor"),
    _known("android", "ANDROID_HOME", "Android/Sdk"),
)

_SYSTEM = (
    b"/usr",
    b"/bin",
    b"/sbin",
    b"/lib",
    b"/lib64",
    b"/opt",
    b"/nix/store",
    b"/gnu/store",
    b"/snap",
    b"/proc",
    b"/dev",
)
_COMPANIONS = {"cargo": "rustup"}
"""Tools whose programs are found on PATH, and whose other half is not."""

_BIN_NAMES = frozenset((b"bin", b"sbin", b"shims", b"condabin", b".bin"))
_LINKS_MAX = 2_000
"""Names of one PATH directory that are looked at."""

_SHOWN_MAX = 64
"""Targets of links that are shown one by one: each is a mount, and mounts make a start slow."""


class Tools(NamedTuple):
    """What was found."""

    homes: tuple[ToolHome, ...]
    links: tuple[tuple[bytes, bytes], ...]
    left_out: tuple[bytes, ...]


def find_toolchains(
    environ: Mapping[bytes, bytes],
    home: bytes,
    workspace: bytes,
    granted: Collection[bytes],
    sensitive: Collection[bytes],
    look: Callable[[bytes, list[tuple[bytes, bytes]]], PathFact],
    reachable: Callable[[bytes], bool],
) -> Tools:
    """Return the tool homes that PATH, a variable or the workspace's own venv needs.

    Args:
        environ: The backend's environment.
        home: The jail user's home directory, without links.
        workspace: The workspace, without links.
        granted: Paths that the policy grants; links inside them are not followed.
        sensitive: Paths that are never shown.
        look: Resolves a path and appends the links it met to a list.
        reachable: Whether the jail's user could reach a path on the host.
    """
    search = _Search(environ, home, (workspace, *granted), sensitive, look, reachable)
    directories = [d for d in environ.get(b"PATH", b"").split(b":") if d.startswith(b"/")]
    for known in KNOWN:
        moved = environ.get(known.variable, b"") if known.variable else b""
        places = [moved] if moved.startswith(b"/") else []
        places += [os.path.join(home, place) for place in known.places]
        for number, place in enumerate(places):
            if not os.path.isdir(place):
                continue
            wanted = number == 0 and bool(moved)
            if wanted or any(is_below(os.path.normpath(d), place) for d in directories):
                search.add_known(known, place)
    for directory in directories:
        search.add_directory(directory)
    for name in (b".venv", b"venv", b"env"):
        search.add_interpreter(os.path.join(workspace, name, b"bin", b"python"))
    for directory in directories:
        search.add_interpreter(os.path.join(directory, b"python"))
    return search.result()


class _Search:
    def __init__(
        self,
        environ: Mapping[bytes, bytes],
        home: bytes,
        granted: tuple[bytes, ...],
        sensitive: Collection[bytes],
        look: Callable[[bytes, list[tuple[bytes, bytes]]], PathFact],
        reachable: Callable[[bytes], bool],
    ) -> None:
        self.environ = environ
        self.home, self.granted, self.sensitive = home, granted, sensitive
        self.look, self.reachable = look, reachable
        self.links: list[tuple[bytes, bytes]] = []
        self.found: dict[str, dict[bytes, PathFact]] = {}
        self.left_out: list[bytes] = []

    def add_known(self, known: Known, place: bytes) -> None:
        if known.name in _COMPANIONS:
            self.add_companion(_COMPANIONS[known.name])
        for part in known.parts:
            self.add(known.name, os.path.join(place, part) if part else place)
        for part in known.cache:
            self.add(f"{known.name}-cache", os.path.join(place, part))

    def add_companion(self, name: str) -> None:
        known = next(entry for entry in KNOWN if entry.name == name)
        moved = self.environ.get(known.variable, b"")
        places = [moved] if moved.startswith(b"/") else [os.path.join(self.home, p) for p in known.places]
        for place in places:
            if os.path.isdir(place):
                self.add_known(known, place)

    def add(self, name: str, path: bytes) -> PathFact | None:
        links: list[tuple[bytes, bytes]] = []
        fact = self.look(path, links)
        real = fact.path
        if fact.kind not in ("dir", "file") or below_any(real, (*_SYSTEM, *self.granted)):
            self.links += links
            return None
        if self.led_by_agent(links):
            self.left_out.append(real)
            return None
        if (
            is_below(self.home, real)
            or real == b"/"
            or any(is_below(top, real, strict=True) for top in self.granted)
        ):
            self.left_out.append(real)  # it would show the home directory, or open the way around a mask
            return None
        secret = below_any(real, self.sensitive) or any(is_below(s, real) for s in self.sensitive)
        if secret or not self.reachable(real):
            self.left_out.append(real)
            return None
        self.links += links
        if self.covered(real):
            return fact
        if name == "links" and len(self.found.get(name, ())) >= _SHOWN_MAX:
            self.left_out.append(real)
        else:
            self.found.setdefault(name, {})[real] = fact
        return fact

    def led_by_agent(self, links: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether the way to a place went over a link inside a grant, which a command may have made."""
        return any(below_any(place, self.granted) for place, _ in links)

    def covered(self, path: bytes) -> bool:
        return below_any(path, (have for paths in self.found.values() for have in paths))

    def add_directory(self, directory: bytes) -> None:
        """Show one directory of PATH, the installation it belongs to, and what its links lead to."""
        links: list[tuple[bytes, bytes]] = []
        fact = self.look(directory, links)
        real = fact.path
        if fact.kind != "dir" or below_any(real, (*_SYSTEM, *self.granted)) or self.led_by_agent(links):
            return
        prefix = os.path.dirname(real)
        whole = os.path.basename(real) in _BIN_NAMES and self.is_installation(prefix)
        if not (whole and self.add("path", prefix)) and self.add("path", directory) is None:
            return
        self.add_links(real)

    def is_installation(self, prefix: bytes) -> bool:
        if is_below(self.home, prefix) or prefix in (b"/", os.path.join(self.home, b".local")):
            return False
        if prefix.count(b"/") < 2 or any(is_below(top, prefix) for top in self.granted):
            return False
        marks = (b"lib", b"conda-meta", b"pyvenv.cfg")
        return os.path.basename(prefix) == b"node_modules" or any(
            os.path.lexists(os.path.join(prefix, name)) for name in marks
        )

    def add_links(self, directory: bytes) -> None:
        try:
            with os.scandir(directory) as names:
                for number, entry in enumerate(names):
                    if number >= _LINKS_MAX:
                        break
                    if entry.is_symlink():
                        self.add_link(entry.path)
        except OSError:
            return

    def add_link(self, link: bytes) -> None:
        links: list[tuple[bytes, bytes]] = []
        target = self.look(link, links)
        if self.led_by_agent(links):
            return
        self.links += links
        if target.kind not in ("file", "dir") or self.covered(target.path):
            return
        if any(is_below(target.path, top) for top in (*_SYSTEM, *self.granted)):
            return
        known = self.known_home(target.path)
        if known is not None:
            self.add_known(*known)
        elif not self.add_prefix(target.path):
            self.add("links", target.path)
        if os.path.basename(target.path).startswith(b"python"):
            self.add_interpreter(target.path)

    def add_prefix(self, program: bytes) -> bool:
        """Show the installation that `…/tool/bin/program` belongs to, so that it finds its own files."""
        parent = os.path.dirname(program)
        prefix = os.path.dirname(parent) if os.path.basename(parent) in _BIN_NAMES else b""
        if not prefix or is_below(self.home, prefix) or prefix in (b"/", os.path.join(self.home, b".local")):
            return False
        return prefix.count(b"/") >= 3 and self.add("links", prefix) is not None

    def known_home(self, path: bytes) -> tuple[Known, bytes] | None:
        for known in KNOWN:
            for place in known.places:
                top = os.path.join(self.home, place)
                if is_below(path, top):
                    return known, top
        return None

    def add_interpreter(self, path: bytes) -> None:
        """Show the home of the interpreter behind a virtual environment, if it is one that is known here.

        Only known homes: the link may be the agent's.
        """
        for _ in range(8):
            try:
                if not stat.S_ISLNK(os.lstat(path).st_mode):
                    break
                path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
            except OSError:
                return
            known = self.known_home(os.path.realpath(path))
            if known is not None:
                self.add_known(*known)
                return

    def result(self) -> Tools:
        homes = tuple(
            ToolHome(name, _outermost(paths.values())) for name, paths in sorted(self.found.items())
        )
        return Tools(homes, tuple(sorted(set(self.links))), tuple(sorted(set(self.left_out))))


def _outermost(facts: Iterable[PathFact]) -> tuple[PathFact, ...]:
    kept: list[PathFact] = []
    for fact in sorted(facts, key=lambda f: f.path):
        if not (kept and is_below(fact.path, kept[-1].path)):
            kept.append(fact)
    return tuple(kept)
