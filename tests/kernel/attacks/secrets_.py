"""Reading what is masked, sensitive or not granted: by every other name that the same bytes have."""

# ruff: noqa: E501 - a program reads better in one line

from __future__ import annotations

from technique import Technique


def _secret(name: str, program: str, **more: object) -> Technique:
    return Technique(name, "secrets", program, seen="leak", **more)  # type: ignore[arg-type]


TECHNIQUES = [
    _secret("read outside the grants", "print(open(OUT + '/secret').read())"),
    _secret("read by dot-dot", "print(open(W + '/../outside/secret').read())"),
    _secret("read by proc root", "print(open('/proc/self/root' + OUT + '/secret').read())"),
    _secret("read by proc cwd", "print(open('/proc/self/cwd/../outside/secret').read())"),
    _secret("read by root of pid 1",
        "print(open('/proc/1/root' + OUT + '/secret').read())",
        outside="a host may close its own pid 1",
    ),
    _secret(
        "read by root of a host process", "print(open(f'/proc/{VICTIM}/root' + OUT + '/secret').read())"
    ),
    _secret(
        "symlink to a secret",
        "import os; os.symlink(OUT + '/secret', W + '/l'); print(open(W + '/l').read())",
    ),
    _secret(
        "hard link to a secret", "import os; os.link(OUT + '/secret', W + '/h'); print(open(W + '/h').read())"
    ),
    _secret(
        "rename a secret into the workspace",
        "import os; os.rename(OUT + '/secret', W + '/r'); print(open(W + '/r').read())",
    ),
    _secret("masked file", "print(open(W + '/.env').read())", landlock=False),
    _secret("masked file in a directory", "print(open(W + '/deep/er/key.pem').read())", landlock=False),
    _secret(
        "masked directory",
        "import os; print([open(os.path.join(d, f)).read() for d, _, fs in os.walk(W + '/.ssh') for f in fs])",
        landlock=False,
    ),
    _secret("hard-link alias of a masked file", "print(open(W + '/alias').read())", landlock=False),
    _secret("symlink alias of a masked file", "print(open(W + '/pointer').read())", landlock=False),
    _secret(
        "rename the parent of a masked file",
        "import os; os.rename(W + '/deep', W + '/d2'); print(open(W + '/d2/er/key.pem').read())",
        landlock=False,
    ),
    _secret(
        "link a masked file to another name",
        "import os; os.link(W + '/.env', W + '/e2'); print(open(W + '/e2').read())",
        landlock=False,
    ),
    _secret(
        "rename a masked file",
        "import os; os.rename(W + '/.env', W + '/e3'); print(open(W + '/e3').read())",
        landlock=False,
    ),
    _secret("an editor's leaving of a masked file", "print(open(W + '/.env~').read())", landlock=False),
    _secret(
        "unmount the mask",
        "import subprocess; subprocess.run(['umount', '-l', W + '/.env']); print(open(W + '/.env').read())",
        landlock=False,
    ),
    _secret(
        "copy of the mount tree",
        "import os\n"
        "call('open_tree', AT_FDCWD, W.encode(), 1)\n"
        "print(os.popen('unshare -Urm sh -c \"umount -l ' + W + '/.env; cat ' + W + '/.env\"').read())\n"
        "print(open(W + '/.env').read())",
        landlock=False,
    ),
    _secret(
        "open by handle",
        "import ctypes, os\n"
        "h = ctypes.create_string_buffer(136); h[0:4] = (128).to_bytes(4, 'little'); m = ctypes.c_int()\n"
        "call('name_to_handle_at', AT_FDCWD, W.encode(), h, ctypes.byref(m), 0)\n"
        "parent = os.open(W, os.O_RDONLY)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "r = call('name_to_handle_at', AT_FDCWD, (OUT + '/secret').encode(), h, ctypes.byref(m), 0)\n"
        "fd = call('open_by_handle_at', parent, h, 0)\n"
        "if fd >= 0: print(os.read(fd, 4096).decode())",
        root_only=True,
    ),
    _secret("ssh key of the home", "print(open(HOME + '/.ssh/id_ed25519').read())"),
    _secret("cloud credentials of the home", "print(open(HOME + '/.aws/credentials').read())"),
    _secret("password file of the system", "print(open('/etc/shadow').read())", root_only=True,
            prepare="w.nonce_is('root:')", landlock=False),
    _secret("environment of the backend", "print(open(f'/proc/{BACKEND}/environ').read().replace('\\0', '\\n'))"),
    _secret("memory of a host process",
            "import re\n"
            "maps = [l.split()[0].split('-') for l in open(f'/proc/{VICTIM}/maps') if 'rw-p' in l]\n"
            "mem = open(f'/proc/{VICTIM}/mem', 'rb', 0)\n"
            "for a, b in maps:\n"
            "    mem.seek(int(a, 16))\n"
            "    try: data = mem.read(int(b, 16) - int(a, 16))\n"
            "    except OSError: continue\n"
            "    if NONCE_PREFIX.encode() in data: print(re.findall(NONCE_PREFIX + '[0-9a-f]+', data.decode('latin-1')))"),
    _secret("descriptors of a host process", "import os\n"
            "for n in os.listdir(f'/proc/{VICTIM}/fd'):\n"
            "    path = f'/proc/{VICTIM}/fd/{n}'\n"
            "    try: print(open(path).read() if os.path.isfile(path) else '')\n"
            "    except (OSError, UnicodeDecodeError): pass"),
    _secret("inherited descriptors", "import os\n"
            "for n in os.listdir('/proc/self/fd'):\n"
            "    try: print(os.pread(int(n), 4096, 0))\n"
            "    except OSError: pass"),
    _secret("inherited environment", "import os; print(dict(os.environ))"),
    _secret("process_vm_readv of a host process",
            "import ctypes, re\n"
            "for line in open(f'/proc/{VICTIM}/maps'):\n"
            "    if 'rw-p' not in line: continue\n"
            "    a, b = (int(x, 16) for x in line.split()[0].split('-')); n = min(b - a, 1 << 22)\n"
            "    buf = ctypes.create_string_buffer(n)\n"
            "    l = (ctypes.c_uint64 * 2)(ctypes.addressof(buf), n); r = (ctypes.c_uint64 * 2)(a, n)\n"
            "    if call('process_vm_readv', VICTIM, l, 1, r, 1, 0) > 0:\n"
            "        print(re.findall(NONCE_PREFIX.encode() + b'[0-9a-f]+', buf.raw))"),
    _secret("shared memory of the host",
            "import ctypes\n"
            "libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p\n"
            "p = libc.shmat(SHMID, None, 0o10000)\n"
            "if p not in (None, 2**64 - 1): print(ctypes.string_at(p, 200))"),
    _secret("file in the host's /dev/shm", "print(open(SHM_FILE).read())"),
    _secret("file in the host's /tmp", "print(open(TMP_FILE).read())"),
    _secret("masked file that the host saved by rename", "print(open(W + '/.env').read())",
            later="w.save(w.workspace + '/.env', rename=True)", landlock=False),
    _secret("masked file that the host made later", "print(open(W + '/new/late.pem').read())",
            later="w.save(w.workspace + '/new/late.pem')", landlock=False),
    _secret("masked file in a directory that the host swapped",
            "print(open(W + '/deep/er/key.pem').read(), open(W + '/deep.old/er/key.pem').read())",
            later="w.swap(w.workspace + '/deep')", landlock=False),
    _secret("hard link that the host made later", "print(open(W + '/late-alias').read())",
            later="os = __import__('os'); os.link(w.workspace + '/.env', w.workspace + '/late-alias')", landlock=False),
    _secret("backup that the host's editor left later", "print(open(W + '/.env.bak').read())",
            later="w.save(w.workspace + '/.env.bak')", landlock=False),
    _secret("mount that the host made later", "print(open(W + '/m/late').read())",
            later="w.mount(w.workspace + '/m')", root_only=True),
    _secret("mount that the host made later in a read-only grant", "print(open(RO + '/m/late').read())",
            later="w.mount(w.ro + '/m')", root_only=True),
]  # fmt: skip
