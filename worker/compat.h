/* compat.h — kernel numbers that the oldest headers we build with do not know, each with the kernel that brought it.
 *
 * musl-gcc sees no <linux/...> headers at all, so the few structures that we pass are defined here too.
 */
#ifndef VJ_COMPAT_H
#define VJ_COMPAT_H

#include <stdint.h>
#include <sys/syscall.h>

/* The numbers above 423 are the same on every architecture. */
#ifndef SYS_close_range
#define SYS_close_range 436 /* 5.9 */
#endif
#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444 /* 5.13 */
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif

/* prctl(2) */
#ifndef PR_SET_NO_NEW_PRIVS
#define PR_SET_NO_NEW_PRIVS 38 /* 3.5 */
#endif
#ifndef PR_SET_CHILD_SUBREAPER
#define PR_SET_CHILD_SUBREAPER 36 /* 3.4 */
#endif
#ifndef PR_CAPBSET_DROP
#define PR_CAPBSET_DROP 24
#endif
#ifndef PR_CAP_AMBIENT
#define PR_CAP_AMBIENT 47 /* 4.3 */
#endif
#ifndef PR_CAP_AMBIENT_CLEAR_ALL
#define PR_CAP_AMBIENT_CLEAR_ALL 4
#endif

/* seccomp(2), 3.17 */
#define VJ_SECCOMP_SET_MODE_FILTER 1

struct vj_sock_fprog {
	unsigned short len; /* instructions of 8 bytes */
	const void *filter;
};

/* landlock(7): ABI 1 is 5.13, net is ABI 4 (6.7), scoped is ABI 6 (6.12) */
struct vj_landlock_ruleset_attr {
	uint64_t handled_access_fs;
	uint64_t handled_access_net;
	uint64_t scoped;
};

struct vj_landlock_path_beneath_attr {
	uint64_t allowed_access;
	int32_t parent_fd;
} __attribute__((packed));

struct vj_landlock_net_port_attr {
	uint64_t allowed_access;
	uint64_t port;
};

#define VJ_LANDLOCK_RULE_PATH_BENEATH 1
#define VJ_LANDLOCK_RULE_NET_PORT 2

/* capabilities(7) */
#define VJ_CAP_SYS_PTRACE 19
#define VJ_CAP_SYS_RESOURCE 24
#define VJ_CAP_VERSION_3 0x20080522u

struct vj_cap_header {
	uint32_t version;
	int32_t pid;
};

struct vj_cap_data {
	uint32_t effective, permitted, inheritable;
};

/* open(2), 2.6.39; ioctl_tty(2), 4.13 */
#ifndef O_PATH
#define O_PATH 010000000
#endif
#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif

/* The kernel's sigset_t has 64 signals on both architectures. */
#define VJ_SIGSET_BYTES 8

#endif
