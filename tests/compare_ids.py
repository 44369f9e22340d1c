"""Compare the ids that ran as root with those that ran as an ordinary user: the same tests, or a mark that says why."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def ids(path: str) -> dict[str, str]:
    """Read `id<TAB>mark` lines; the identity is taken out of the id."""
    table = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        name, _, mark = line.partition("\t")
        table[re.sub(r"(?<=[\[-])(?:root|user)(?=[\]-])", "*", name)] = mark
    return table


def main(root: str, user: str) -> int:
    """Print what differs; 1 when a difference carries no mark."""
    as_root, as_user = ids(root), ids(user)
    wrong = [f"only as root: {name}" for name in as_root if name not in as_user and as_root[name] != "root"]
    wrong += [f"only as user: {name}" for name in as_user if name not in as_root and as_user[name] != "user"]
    for line in wrong:
        print(line)
    print(
        f"{len(as_root)} tests as root, {len(as_user)} as an ordinary user, {len(wrong)} differ without a mark"
    )
    return 1 if wrong or not as_root or not as_user else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
