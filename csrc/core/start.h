/* start.h — start a jail's first process, end it, and run the launcher; without Python and without fork(2).
 *
 * Every function returns 0 or a negative errno, blocks only up to its deadline and leaves neither a descriptor nor a
 * zombie behind when it fails. All are safe to call from any thread and without the GIL.
 */
#ifndef VJ_START_H
#define VJ_START_H

#include <stddef.h>
#include <stdint.h>

#define VJ_DETAIL_MAX 8192 /* bytes of bwrap's stderr that are kept */
#define VJ_START_FDS_MAX 512

/* The child's descriptors. Data descriptors follow from VJ_FD_DATA, in order. */
#define VJ_FD_SOCKET 3
#define VJ_FD_ARGS 4
#define VJ_FD_INFO 5
#define VJ_FD_DATA 10

/* The step that failed. */
enum vj_stage {
	VJ_STAGE_NONE = 0,
	VJ_STAGE_PREPARE,  /* pipes and memfds */
	VJ_STAGE_THREAD,   /* the starter thread */
	VJ_STAGE_CLONE,    /* clone(2) */
	VJ_STAGE_FDS,      /* the child's descriptors */
	VJ_STAGE_EXEC,     /* execve(2) of bwrap, of the worker or of the launcher */
	VJ_STAGE_STAGING,  /* the launcher: mount namespace, staged binds, change of identity */
	VJ_STAGE_BWRAP,    /* bwrap ended by itself: detail is what it said */
	VJ_STAGE_INFO,     /* bwrap did not tell the pid in time, or told nonsense */
	VJ_STAGE_IDENTITY, /* the pid it told is not its child, or shares our namespaces */
	VJ_STAGE_READY,    /* bwrap did not reach the worker in time */
	VJ_STAGE_NAMESPACE /* descriptors of the namespaces */
};

struct vj_start_request {
	const char *path;   /* program for execve; NULL: exec_fd */
	int exec_fd;        /* program as a descriptor, −1 when path is set */
	char *const *argv;  /* NULL-terminated */
	int sock;           /* the worker's socket → VJ_FD_SOCKET */
	const uint8_t *args; /* bwrap's NUL-separated options → VJ_FD_ARGS; NULL: no bwrap, the program is the worker */
	size_t args_len;
	const int *fds;     /* → VJ_FD_DATA + i */
	uint32_t nfds;
	int deadline_ms;
};

/* Owned by the caller, close-on-exec. monitor_* is bwrap, our child; without bwrap it is the worker itself. */
struct vj_started {
	int32_t monitor_pid;
	int32_t monitor_fd; /* pidfd */
	int32_t pid;        /* the worker, in our pid namespace */
	int32_t pidfd;
	int32_t mntns_fd;   /* −1 without bwrap */
	int32_t userns_fd;  /* that owns mntns_fd; −1: it is our own */
};

struct vj_start_error {
	int32_t stage; /* enum vj_stage */
	int32_t err;   /* positive errno, 0 when there is none */
	uint32_t detail_len;
	char detail[VJ_DETAIL_MAX]; /* not NUL-terminated; the jail builder's stderr */
};

/* Start and wait until the worker's program runs. From the permanent starter thread, because PR_SET_PDEATHSIG (ours
 * and bwrap's --die-with-parent) follows the thread that created the child, prctl(2). */
int vj_start(const struct vj_start_request *request, struct vj_started *started, struct vj_start_error *error);

/* End a jail: SIGKILL to the worker (pidfd; −1: none), wait for the monitor up to half of deadline_ms, then SIGKILL
 * to it too. *status: wait(2) status of the monitor, −1 when somebody else has reaped it. Closes nothing. */
int vj_reap(int monitor_pidfd, int worker_pidfd, int deadline_ms, int *status);

/* The launcher's sealed image that vj_enter executes; duplicated, kept for the life of the process. */
int vj_set_launcher(int fd);

/* Apply ops (msgpack, livemount.h) inside the mount namespace mntns_fd, through the launcher. userns_fd: the user
 * namespace that owns it, −1 when it is our own. results: one positive errno an op, 0 = done; *count: how many ops
 * answered. −ETIMEDOUT: killed at the deadline, any part of the ops may have happened. */
int vj_enter(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms, int32_t *results,
             size_t capacity, size_t *count);

/* Open a directory or file as an O_PATH descriptor without following any symlink, openat2(2), Linux 5.6. */
int vj_open_path(const char *path, int *fd);

#endif
