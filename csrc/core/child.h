/* child.h — one program started by vfork-like clone(2), with exactly the descriptors that it is given. */
#ifndef VJ_CHILD_H
#define VJ_CHILD_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define VJ_CHILD_STACK 16384 /* bytes; the child calls nothing deep before exec */

struct vj_dup {
	int from, to;
};

struct vj_child {
	const char *path; /* NULL: exec_fd */
	int exec_fd;
	char *const *argv;
	const struct vj_dup *dups; /* `to` are distinct; every other descriptor is closed */
	size_t ndups;
	int *scratch;   /* room for ndups + 1 numbers */
	int new_session; /* leave the caller's process group: a terminal's ^C is not for this program */
	pid_t parent;   /* our own pid */
	int stage, err; /* out: what failed before exec */
};

/* Start it. 0: running, *pid and *pidfd (close-on-exec) are the caller's. −errno: nothing was left behind; c->stage
 * says where. `stack`: VJ_CHILD_STACK bytes. All signals must be blocked in the calling thread. */
int vj_child_start(struct vj_child *c, void *stack, pid_t *pid, int *pidfd);

/* waitid(2) on a pidfd without blocking longer than timeout_ms. 0 and *status (wait(2) form; −1: reaped by somebody
 * else), or −ETIMEDOUT. */
int vj_child_wait(int pidfd, int timeout_ms, int *status);
int vj_pidfd_kill(int pidfd, int signo);
int vj_pidfd_open(pid_t pid);

/* Milliseconds of CLOCK_MONOTONIC, and what is left until `deadline`, never negative. */
int64_t vj_now_ms(void);
int vj_left_ms(int64_t deadline);

/* Anonymous file with these bytes, positioned at its beginning, not executable. */
int vj_memfd(const char *name, const uint8_t *data, size_t len);

/* close(2) of *fd when it is open, and −1 into it; for __attribute__((cleanup)) too. errno is kept. */
void vj_close(int *fd);
#define VJ_CLEANUP_FD __attribute__((cleanup(vj_close)))

#endif
