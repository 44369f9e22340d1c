/* child.c — clone, exec, wait. The child shares our memory until exec, so it only makes system calls. */
#define _GNU_SOURCE
#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "start.h"

void vj_close(int *fd)
{
	int saved = errno;

	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	errno = saved;
}

int64_t vj_now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int vj_left_ms(int64_t deadline)
{
	int64_t left = deadline - vj_now_ms();

	return left < 0 ? 0 : left > INT_MAX ? INT_MAX : (int)left;
}

int vj_memfd(const char *name, const uint8_t *data, size_t len)
{
	int fd = (int)syscall(VJ_SYS_memfd_create, name, VJ_MFD_CLOEXEC | VJ_MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = (int)syscall(VJ_SYS_memfd_create, name, VJ_MFD_CLOEXEC | VJ_MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	while (len > 0) {
		ssize_t n = write(fd, data, len);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0) {
			int err = n < 0 ? errno : EIO;
			close(fd);
			return -err;
		}
		data += n;
		len -= (size_t)n;
	}
	if (lseek(fd, 0, SEEK_SET) < 0) {
		int err = errno;
		close(fd);
		return -err;
	}
	return fd;
}

int vj_pidfd_kill(int pidfd, int signo)
{
	return syscall(VJ_SYS_pidfd_send_signal, pidfd, signo, NULL, 0) ? -errno : 0;
}

int vj_pidfd_open(pid_t pid)
{
	int fd = (int)syscall(VJ_SYS_pidfd_open, pid, 0); /* close-on-exec by itself */

	return fd < 0 ? -errno : fd;
}

int vj_child_wait(int pidfd, int timeout_ms, int *status)
{
	int64_t deadline = vj_now_ms() + timeout_ms;

	*status = -1;
	for (;;) {
		struct pollfd p = {.fd = pidfd, .events = POLLIN};
		int n = poll(&p, 1, vj_left_ms(deadline));
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		if (n == 0)
			return -ETIMEDOUT;
		break;
	}
	siginfo_t info;
	memset(&info, 0, sizeof info);
	while (waitid((idtype_t)VJ_P_PIDFD, (id_t)pidfd, &info, WEXITED | WNOHANG) != 0)
		if (errno != EINTR)
			return errno == ECHILD ? 0 : -errno;
	if (info.si_pid == 0)
		return 0;
	if (info.si_code == CLD_EXITED)
		*status = (info.si_status & 0xff) << 8;
	else
		*status = (info.si_status & 0x7f) | (info.si_code == CLD_DUMPED ? 0x80 : 0);
	return 0;
}

static void close_from(unsigned first)
{
	struct rlimit limit;

	if (syscall(VJ_SYS_close_range, first, ~0u, 0) == 0)
		return;
	/* before Linux 5.9, or under a filter that does not know the call */
	if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > 65536)
		limit.rlim_cur = 65536;
	for (unsigned fd = first; fd < limit.rlim_cur; fd++)
		close((int)fd);
}

/* Give the child the numbers it was promised. Sources first move out of the way of all targets. */
static int arrange(struct vj_child *c)
{
	int top = 2;

	for (size_t i = 0; i < c->ndups; i++)
		if (c->dups[i].to > top)
			top = c->dups[i].to;
	for (size_t i = 0; i < c->ndups; i++) {
		c->scratch[i] = fcntl(c->dups[i].from, F_DUPFD_CLOEXEC, top + 2);
		if (c->scratch[i] < 0)
			return -1;
	}
	if (c->path == NULL) {
		int moved = fcntl(c->exec_fd, F_DUPFD_CLOEXEC, top + 2);
		if (moved < 0 || dup3(moved, top + 1, O_CLOEXEC) < 0)
			return -1;
	}
	for (int fd = 0; fd <= top; fd++) {
		size_t i = 0;
		while (i < c->ndups && c->dups[i].to != fd)
			i++;
		if (i == c->ndups)
			close(fd);
		else if (dup2(c->scratch[i], fd) < 0)
			return -1;
	}
	close_from((unsigned)top + (c->path ? 1u : 2u));
	return top + 1;
}

/* What exec would let through: ignored signals, a raised priority, the umask, the directory. */
static void forget_caller(const struct vj_child *c)
{
	static const uint64_t nothing[4]; /* the kernel's struct sigaction: SIG_DFL, no flags, empty mask */
	static const struct sched_param normal;

	for (int signo = 1; signo <= 64; signo++)
		syscall(SYS_rt_sigaction, signo, nothing, NULL, sizeof(uint64_t));
	if (syscall(SYS_sched_getscheduler, 0) > 0)
		syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, &normal);
	if (syscall(SYS_getpriority, PRIO_PROCESS, 0) > 20) /* the raw call answers 20 − nice */
		syscall(SYS_setpriority, PRIO_PROCESS, 0, 0);
	umask(022);
	if (chdir("/") != 0) {
		/* then the caller's directory stays; everything is named absolutely */
	}
	if (c->new_session)
		setsid();
}

static int child_main(void *arg)
{
	static char *const no_environment[] = {NULL};
	static const uint64_t no_signals;
	struct vj_child *c = arg;

	/* the creating thread may be gone already: then nobody would ever end us */
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	if (getppid() != c->parent)
		_exit(127);
	forget_caller(c);
	c->stage = VJ_STAGE_FDS;
	int exec_fd = arrange(c);
	if (exec_fd < 0) {
		c->err = errno;
		_exit(127);
	}
	c->stage = VJ_STAGE_EXEC;
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &no_signals, NULL, sizeof no_signals);
	if (c->path)
		execve(c->path, c->argv, no_environment);
	else
		syscall(VJ_SYS_execveat, exec_fd, "", c->argv, no_environment, VJ_AT_EMPTY_PATH);
	c->err = errno;
	_exit(127);
}

int vj_child_start(struct vj_child *c, void *stack, pid_t *pid, int *pidfd)
{
	int status;

	c->stage = VJ_STAGE_CLONE;
	c->err = 0;
	c->parent = getpid();
	*pidfd = -1;
	*pid = clone(child_main, (char *)stack + VJ_CHILD_STACK, CLONE_VM | CLONE_VFORK | VJ_CLONE_PIDFD | SIGCHLD, c,
	             pidfd);
	if (*pid < 0)
		return -errno;
	if (c->err == 0) /* a child killed before exec looks like one killed after: its pidfd tells */
		return 0;
	vj_child_wait(*pidfd, 1000, &status);
	vj_close(pidfd);
	return -c->err;
}
