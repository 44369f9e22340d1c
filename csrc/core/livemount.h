/* livemount.h — the entering child's work: mounts by descriptor inside a jail's mount namespace.
 *
 * Runs in the launcher, single-threaded, after vj_ns_enter. The jail may be running: no name is followed through a
 * symlink, every mount is made on the descriptor that was looked at, and afterwards the name is opened again to see
 * that it shows what was meant, mount_setattr(2), move_mount(2), Linux 5.12.
 */
#ifndef VJ_LIVEMOUNT_H
#define VJ_LIVEMOUNT_H

#include <stddef.h>
#include <stdint.h>

#define VJ_OPS_MAX (16u * 1024 * 1024) /* bytes of one list of ops */
#define VJ_COVER_FILE "/run/vectora-jail/file"
#define VJ_COVER_DIR "/run/vectora-jail/dir"

/* ["private"]                          the whole tree recursively private: no later mount of the host appears
 * ["ro", path, optional]               bind onto itself, recursively read-only; optional: a missing path is no error
 * ["pin", path]                        bind onto itself: the name can no longer be renamed or replaced
 * ["cover", path]                      hide a file or directory under an empty one
 * ["cover_at", path, dev, ino]         the same, but only when the name shows that object
 * ["same", path, dev, ino]             nothing, but only when the name is a mount and shows that object
 * ["uncover", path] ["uncover", path, dev, ino]   take a cover away, the second only from that object
 * ["network"]                          enter the network namespace, for sysctl names below net/
 * ["sysctl", name, value]              name relative to /proc/sys
 * ["inodes", path, count]              limit of a tmpfs
 * Paths are absolute; str and bin are the same. */

/* What an op answers beyond the errnos of the system calls it makes. */
#define VJ_OP_NO_COVER 107  /* ENOTCONN: /run/vectora-jail/{file,dir} is missing in this jail */
#define VJ_OP_CHANGED 116   /* ESTALE: the name showed another object before or after the mount */
#define VJ_OP_UNKNOWN 38    /* ENOSYS: no such op, or a kernel that cannot */
#define VJ_OP_NOT_COVER 22  /* EINVAL: uncover of something that is no cover */

/* Become part of the namespaces. userns_fd −1: the mount namespace belongs to our own. Single-threaded callers only. */
int vj_ns_enter(int mntns_fd, int userns_fd);

/* Execute a msgpack array of ops in order; one errno an op into results. An op that fails stops no other.
 * −EBADMSG: malformed, nothing was done; −E2BIG: more than `capacity` ops. */
int vj_ops_apply(const uint8_t *ops, size_t len, int32_t *results, size_t capacity, size_t *count);

#endif
