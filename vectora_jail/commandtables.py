"""What is known about programs, as data: which only read, which harm, which run another program (pure)."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BIN = ("/bin/", "/usr/bin/", "/usr/local/bin/", "/sbin/", "/usr/sbin/")
# Whatever their arguments, these read and print.
READS = _words(
    "cat ls pwd echo head tail wc grep egrep fgrep cut tr diff cmp comm stat which basename dirname "
    "realpath readlink whoami id groups uname printenv true false test [ expr seq nl tac rev fold column paste "
    "join od hexdump strings md5sum sha1sum sha256sum sha512sum cksum du df uptime free sleep nproc arch tty logname"
)
# These read unless one of the options is there; short ones also inside a cluster.
READS_UNLESS: dict[str, tuple[str, ...]] = {
    "rg": ("--pre", "--hostname-bin", "--search-zip", "-z"),
    "sort": ("-o", "--output", "--compress-program", "-T", "--temporary-directory"),
    "date": ("-s", "--set"),
    "file": ("-C", "--compile", "-m", "--magic-file", "-z", "-Z", "--uncompress", "--uncompress-noreport"),
    "tree": ("-o", "--output", "-R"),
    "ps": (),
    "jq": ("-f", "--from-file", "-L", "--in-place", "-i"),
    "find": (
        "-exec",
        "-execdir",
        "-ok",
        "-okdir",
        "-delete",
        "-fprint",
        "-fprint0",
        "-fprintf",
        "-fls",
        "-files0-from",
    ),
    "fd": ("-x", "-X", "--exec", "--exec-batch"),
}
GIT_READS = _words(
    "status log diff show blame rev-parse ls-files ls-tree describe shortlog cat-file merge-base "
    "rev-list name-rev for-each-ref show-ref count-objects check-ignore whatchanged diff-tree diff-index"
)
GIT_BAD = (
    "--output",
    "--ext-diff",
    "--textconv",
    "--open-files-in-pager",
    "--filters",
    "--exec",
    "-O",
    "-o",
    "--no-index",
)
VERSIONS = _words(
    "python python3 node npm pip pip3 go rustc cargo gcc g++ clang make java git ruby perl bash"
)

SHELLS = _words("sh bash dash zsh ksh ash fish mksh yash")
INTERPRETERS = SHELLS | _words("python python2 python3 perl ruby node php lua")
HARMS = {
    "mkfs": "makes a file system",
    "fdisk": "changes a disk",
    "sfdisk": "changes a disk",
    "parted": "changes a disk",
    "wipefs": "erases a disk",
    "mkswap": "overwrites a disk",
    "shred": "destroys files",
    "dd": "copies raw blocks",
    "shutdown": "stops the host",
    "reboot": "stops the host",
    "halt": "stops the host",
    "poweroff": "stops the host",
    "telinit": "stops the host",
    "init": "stops the host",
    "kexec": "stops the host",
    "sudo": "takes another user's rights",
    "doas": "takes another user's rights",
    "su": "takes another user's rights",
    "pkexec": "takes another user's rights",
    "runuser": "takes another user's rights",
    "insmod": "changes the kernel",
    "modprobe": "changes the kernel",
    "rmmod": "changes the kernel",
    "swapoff": "changes the kernel",
    "nsenter": "enters another namespace",
}
# wrapper → (options with a value, positional words before the command)
WRAPPERS: dict[str, tuple[frozenset[str], int]] = {
    "time": (frozenset({"-f", "-o", "--format", "--output"}), 0),
    "nice": (frozenset({"-n", "--adjustment"}), 0),
    "ionice": (frozenset({"-c", "-n"}), 0),
    "nohup": (frozenset(), 0),
    "command": (frozenset(), 0),
    "builtin": (frozenset(), 0),
    "exec": (frozenset({"-a"}), 0),
    "setsid": (frozenset(), 0),
    "stdbuf": (frozenset({"-i", "-o", "-e"}), 0),
    "timeout": (frozenset({"-s", "-k", "--signal", "--kill-after"}), 1),
    "env": (frozenset({"-u", "--unset", "-C", "--chdir"}), 0),
    "xargs": (
        frozenset(
            {"-I", "-n", "-P", "-L", "-d", "-a", "-E", "-s", "--max-args", "--max-procs", "--delimiter"}
        ),
        0,
    ),
    "parallel": (frozenset({"-j", "--jobs"}), 0),
    "watch": (frozenset({"-n", "--interval"}), 0),
    "strace": (frozenset({"-e", "-o", "-p", "-s"}), 0),
    "chroot": (frozenset(), 1),
    "unshare": (frozenset(), 0),
    "flock": (frozenset({"-w", "-E"}), 1),
    "taskset": (frozenset(), 1),
    "chrt": (frozenset(), 1),
    "busybox": (frozenset(), 0),
    "toybox": (frozenset(), 0),
    "ltrace": (frozenset({"-e", "-o"}), 0),
    "proot": (frozenset(), 0),
    "trap": (frozenset(), 0),
}
# Wrappers that change nothing about what the inner command may do.
TRANSPARENT = frozenset({"time", "nice", "timeout", "command", "nohup", "builtin", "stdbuf"})
