# The compiled shim (csrc/): what each function does is said in the header that declares it.
from typing import Any

ffi: Any

class _Library:
    # csrc/core/start.h
    def vj_start(self, request: Any, started: Any, error: Any, /) -> int: ...
    def vj_reap(self, monitor_pidfd: int, worker_pidfd: int, deadline_ms: int, status: Any, /) -> int: ...
    def vj_set_launcher(self, fd: int, /) -> int: ...
    def vj_enter(
        self,
        mntns_fd: int,
        userns_fd: int,
        ops: Any,
        length: int,
        deadline_ms: int,
        results: Any,
        capacity: int,
        count: Any,
        /,
    ) -> int: ...
    def vj_open_path(self, path: bytes, fd: Any, /) -> int: ...
    # csrc/images.h
    def vj_image_hash(self, program: bytes, arch: bytes, /) -> Any: ...
    # csrc/channel.h, csrc/core/treewatch.h
    def __getattr__(self, name: str, /) -> Any: ...

lib: _Library
