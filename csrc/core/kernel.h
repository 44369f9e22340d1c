/* kernel.h — numbers of the mount and process system calls, each with the kernel that brought it.
 *
 * Raw system calls with our own constants: musl-gcc sees no <linux/...> headers, and a libc wrapper newer than glibc
 * 2.17 would raise the wheel's platform tag. Numbers from 424 on are the same on every architecture.
 */
#ifndef VJ_KERNEL_H
#define VJ_KERNEL_H

#include <stdint.h>

#define VJ_SYS_pidfd_send_signal 424 /* 5.1 */
#define VJ_SYS_open_tree 428         /* 5.2 */
#define VJ_SYS_move_mount 429        /* 5.2 */
#define VJ_SYS_fsconfig 431          /* 5.2 */
#define VJ_SYS_fspick 433            /* 5.2 */
#define VJ_SYS_pidfd_open 434        /* 5.3 */
#define VJ_SYS_close_range 436       /* 5.9 */
#define VJ_SYS_openat2 437           /* 5.6 */
#define VJ_SYS_mount_setattr 442     /* 5.12 */
#if defined(__x86_64__)
#define VJ_SYS_memfd_create 319 /* 3.17 */
#define VJ_SYS_execveat 322     /* 3.19 */
#define VJ_SYS_setns 308        /* 3.0 */
#elif defined(__aarch64__)
#define VJ_SYS_memfd_create 279
#define VJ_SYS_execveat 281
#define VJ_SYS_setns 268
#else
#error "vectora-jail: x86_64 and aarch64 only"
#endif

#define VJ_CLONE_PIDFD 0x1000 /* 5.2 */
#define VJ_P_PIDFD 3          /* 5.4, waitid(2) */

#define VJ_MFD_CLOEXEC 1u
#define VJ_MFD_ALLOW_SEALING 2u
#define VJ_MFD_NOEXEC_SEAL 8u /* 6.3 */

#define VJ_NS_GET_USERNS 0xb701u /* 4.9, ioctl_ns(2) */

/* openat2(2) */
struct vj_open_how {
	uint64_t flags, mode, resolve;
};
#define VJ_RESOLVE_NO_MAGICLINKS 0x02u
#define VJ_RESOLVE_NO_SYMLINKS 0x04u
#define VJ_RESOLVE_BENEATH 0x08u
#ifndef O_PATH
#define O_PATH 010000000
#endif

/* open_tree(2), move_mount(2), mount_setattr(2) */
#define VJ_OPEN_TREE_CLONE 1u
#define VJ_OPEN_TREE_CLOEXEC 02000000u /* O_CLOEXEC on both architectures */
#define VJ_AT_EMPTY_PATH 0x1000
#define VJ_AT_RECURSIVE 0x8000
#define VJ_MOVE_MOUNT_F_EMPTY_PATH 0x04u
#define VJ_MOVE_MOUNT_T_EMPTY_PATH 0x40u
struct vj_mount_attr {
	uint64_t attr_set, attr_clr, propagation, userns_fd;
};
#define VJ_MOUNT_ATTR_RDONLY 0x01u
#define VJ_MOUNT_ATTR_NOSUID 0x02u
#define VJ_MOUNT_ATTR_NODEV 0x04u
#define VJ_MOUNT_ATTR_NOEXEC 0x08u

/* fspick(2), fsconfig(2) */
#define VJ_FSPICK_CLOEXEC 1u
#define VJ_FSPICK_EMPTY_PATH 8u
#define VJ_FSCONFIG_SET_STRING 1u
#define VJ_FSCONFIG_CMD_RECONFIGURE 7u

/* statx(2), 4.11; STATX_ATTR_MOUNT_ROOT 5.8 */
#if defined(__x86_64__)
#define VJ_SYS_statx 332
#else
#define VJ_SYS_statx 291
#endif
#define VJ_STATX_ATTR_MOUNT_ROOT 0x2000u
struct vj_statx {
	uint32_t mask, blksize;
	uint64_t attributes;
	uint32_t nlink, uid, gid;
	uint16_t mode, pad1;
	uint64_t ino, size, blocks, attributes_mask;
	uint64_t times[8];
	uint32_t rdev_major, rdev_minor, dev_major, dev_minor;
	uint64_t spare[14];
};

#endif
