"""Changing what is not granted, is protected, or will be run on the host later."""

# ruff: noqa: E501 - a program reads better in one line

from __future__ import annotations

from technique import Technique


def _write(name: str, program: str, check: str, **more: object) -> Technique:
    return Technique(name, "writes", program, seen="host", check=check, **more)  # type: ignore[arg-type]


_TOUCHED = "w.read(w.out + '/target') != 'before'"

TECHNIQUES = [
    _write("write outside the grants", "open(OUT + '/target', 'w').write('x')", _TOUCHED),
    _write("create outside the grants", "open(OUT + '/new', 'w').write('x')", "w.exists(w.out + '/new')"),
    _write("delete outside the grants", "import os; os.unlink(OUT + '/target')", "not w.exists(w.out + '/target')"),
    _write("truncate outside the grants", "import os; os.truncate(OUT + '/target', 0)", _TOUCHED),
    _write("write a read-only grant", "open(RO + '/target', 'w').write('x')", "w.read(w.ro + '/target') != 'before'"),
    _write("create in a read-only grant", "open(RO + '/new', 'w').write('x')", "w.exists(w.ro + '/new')"),
    _write("rename out of the workspace", "import os; open('a', 'w').write('x'); os.rename('a', OUT + '/a')",
           "w.exists(w.out + '/a')"),
    _write("rename the workspace away", "import os; os.rename(W, W + '2')", "w.exists(w.workspace + '2')"),
    _write("write through a symlink of the workspace", "import os; os.symlink(OUT + '/target', 'l');"
           " open('l', 'w').write('x')", _TOUCHED),
    _write("write through a hard link", "import os; os.link(RO + '/target', 'h'); open('h', 'w').write('x')",
           "w.read(w.ro + '/target') != 'before'"),
    _write("write through a read-only descriptor", "import os; fd = os.open(RO + '/target', os.O_RDONLY);"
           " open(f'/proc/self/fd/{fd}', 'w').write('x')", "w.read(w.ro + '/target') != 'before'"),
    _write("write a masked file", "open(W + '/.env', 'w').write('x')", "w.nonce not in w.read(w.workspace + '/.env')",
           landlock=False),
    _write("replace a masked file", "import os; open('t', 'w').write('x'); os.rename('t', W + '/.env')",
           "w.nonce not in w.read(w.workspace + '/.env')", landlock=False),
    _write("edit the policy", "open(W + '/vectora.toml', 'a').write('x = 1')", "'x = 1' in w.read(w.workspace + '/vectora.toml')",
           landlock=False),
    _write("replace the policy", "import os; open('t', 'w').write('x = 1'); os.rename('t', W + '/vectora.toml')",
           "'x = 1' in w.read(w.workspace + '/vectora.toml')", landlock=False),
    _write("plant a git hook", "import os; open(W + '/.git/hooks/post-checkout', 'w').write('x')",
           "w.exists(w.workspace + '/.git/hooks/post-checkout')", landlock=False),
    _write("edit git's config", "open(W + '/.git/config', 'a').write('[core]\\n\\tfsmonitor = x\\n')",
           "'fsmonitor' in w.read(w.workspace + '/.git/config')", landlock=False),
    _write("swap the git directory", "import os; os.rename(W + '/.git', W + '/g'); os.makedirs(W + '/.git/hooks');"
           " open(W + '/.git/hooks/post-checkout', 'w').write('x')",
           "w.exists(w.workspace + '/.git/hooks/post-checkout')", landlock=False),
    _write("write the shell's start file", "open(HOME + '/.bashrc', 'a').write('x')", "w.read(w.home + '/.bashrc') != 'before'"),
    _write("leave a set-id file by chmod", "import os; open('s', 'w'); os.chmod('s', 0o4755)", "w.set_id('s')"),
    _write("leave a set-id file by open", "import os; os.open('s', os.O_CREAT | os.O_WRONLY, 0o4755)", "w.set_id('s')"),
    _write("leave a set-id file by openat2", "import ctypes, os\n"
           "call('openat2', AT_FDCWD, b's', (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o4755, 0), 24)", "w.set_id('s')"),
    _write("leave a set-id file by fchmodat2", "open('s', 'w'); call('fchmodat2', AT_FDCWD, b's', 0o4755, 0)", "w.set_id('s')",
           outside="succeeds from Linux 6.6"),
    _write("leave a set-id file by mknod", "import os; os.mknod('s', 0o104755)", "w.set_id('s')"),
    _write("make a device node", "import os; os.mknod('m', 0o060666, os.makedev(1, 1))",
           "w.exists(w.workspace + '/m')", root_only=True),
    _write("write a kernel setting", "v = open('/proc/sys/kernel/core_pattern').read();"
           " open('/proc/sys/kernel/core_pattern', 'w').write(v); won('core_pattern')", "'WON' in w.output", root_only=True),
    _write("bind a file over a program", "import subprocess; open('t', 'w').write('x');"
           " subprocess.run(['mount', '--bind', 't', RO + '/target'])", "w.read(w.ro + '/target') != 'before'",
           prepare="", outside="would need the host's mount table changed"),
]  # fmt: skip
