/* job.c — the start of one command: memory, descriptors, the child until its exec.
 *
 * The child is a clone(CLONE_VM) without CLONE_VFORK (clone(2)): no page table is copied, and a command that stops or
 * blocks its half-born sibling never stops the worker. It runs on a stack of its own, uses raw system calls only, and
 * writes why it could not start into the job that it shares with the worker.
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096u
#define SLAB_SIZE (PAGE + SLAB_STACK + VJ_MESSAGE_MAX + PAGE + SLAB_POINTERS * sizeof(char *) + PAGE)
#define SLAB_USED_LITTLE 8192u /* what a slab may keep resident while it waits */

static struct slab *free_slabs;
static struct job jobs[VJ_JOBS_MAX];
static uint16_t free_jobs[VJ_JOBS_MAX];
static int nfree, ntouched; /* entries never used are taken only when no used one is free */
static struct job *active[VJ_JOBS_MAX];
static int nactive;
static uint64_t sequence;

/* ---- slabs ---- */

struct slab *slab_get(void)
{
	struct slab *s = free_slabs;
	if (s) {
		free_slabs = s->next;
		s->next = NULL;
		return s;
	}
	uint8_t *m = mmap(NULL, SLAB_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (m == MAP_FAILED)
		return NULL;
	mprotect(m, PAGE, PROT_NONE); /* a stack that grows too far stops there */
	/* The record lies at the end of the stack's last page, so that an ordinary call touches few pages. */
	s = (struct slab *)(void *)(m + PAGE + SLAB_STACK) - 1;
	s = (struct slab *)((uintptr_t)s & ~(uintptr_t)63);
	s->stack_top = (uint8_t *)s;
	s->message = m + PAGE + SLAB_STACK;
	s->pointers = (char **)(void *)(s->message + VJ_MESSAGE_MAX + PAGE);
	s->body = NULL;
	s->next = NULL;
	return s;
}

uint8_t *slab_body(struct slab *s)
{
	if (!s->body) {
		void *p = mmap(NULL, BODY_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
			       -1, 0);
		s->body = p == MAP_FAILED ? NULL : p;
	}
	return s->body;
}

void slab_put(struct slab *s)
{
	if (s->body)
		munmap(s->body, BODY_SIZE);
	s->body = NULL;
	if (s->used > SLAB_USED_LITTLE) {
		madvise(s->message, VJ_MESSAGE_MAX + PAGE, MADV_DONTNEED);
		madvise(s->pointers, SLAB_POINTERS * sizeof(char *), MADV_DONTNEED);
	}
	s->used = 0;
	s->next = free_slabs;
	free_slabs = s;
}

/* ---- the table of jobs ---- */

static struct job *job_new(void)
{
	int i;
	if (nfree)
		i = free_jobs[--nfree];
	else if (ntouched < VJ_JOBS_MAX)
		i = ntouched++;
	else
		return NULL;
	struct job *j = &jobs[i];
	memset(j, 0, sizeof *j);
	j->tag = tag_base() - (++sequence * VJ_JOBS_MAX + (uint64_t)i);
	j->status.slot = j->exec_pipe.slot = j->status.fd = j->exec_pipe.fd = j->tty = j->master = j->pts = -1;
	j->active = nactive;
	active[nactive++] = j;
	return j;
}

void job_free(struct job *j)
{
	source_close(&j->status);
	source_close(&j->exec_pipe);
	if (j->master >= 0)
		close(j->master);
	chan_close(j->chan);
	j->chan = NULL;
	if (j->slab)
		slab_put(j->slab);
	j->slab = NULL;
	j->state = JOB_FREE;
	active[j->active] = active[--nactive];
	active[j->active]->active = j->active;
	free_jobs[nfree++] = (uint16_t)(j - jobs);
}

int jobs_active(void)
{
	return nactive;
}

struct job *jobs_active_at(int i)
{
	return active[i];
}

struct job *job_by_tag(uint64_t tag)
{
	struct job *j = &jobs[(tag_base() - tag) & (VJ_JOBS_MAX - 1)];
	return j->state != JOB_FREE && j->tag == tag ? j : NULL;
}

struct job *job_find(int64_t id)
{
	for (int i = 0; i < nactive; i++)
		if (active[i]->id == id && (active[i]->state == JOB_RUNNING || active[i]->state == JOB_ENDING ||
					   active[i]->state == JOB_DRAINING))
			return active[i];
	return NULL;
}

void job_list(struct mp_writer *w, uint64_t now)
{
	uint32_t n = 0;
	static const char *const names[] = {"exec", "spawn", "terminal"};
	for (int i = 0; i < nactive; i++)
		n += active[i]->state == JOB_RUNNING;
	mp_write_array(w, n);
	for (int i = 0; i < nactive; i++) {
		if (active[i]->state != JOB_RUNNING)
			continue;
		mp_write_map(w, 4);
		mp_write_str(w, "id");
		mp_write_int(w, active[i]->id);
		mp_write_str(w, "kind");
		mp_write_str(w, names[active[i]->kind]);
		mp_write_str(w, "pid");
		mp_write_int(w, active[i]->pid);
		mp_write_str(w, "ms");
		mp_write_uint(w, (now - active[i]->start_ns) / 1000000);
	}
}

/* ---- the child ---- */

_Noreturn static NO_SANITIZE void child_fail(struct job *j, enum job_stage stage, long err)
{
	j->stage = (int32_t)stage;
	j->exec_errno = (int32_t)-err;
	raw_exit(err == -ENOENT || err == -ENOTDIR ? 127 : 126);
}

static NO_SANITIZE size_t length(const char *s)
{
	size_t n = 0;
	while (s[n])
		n++;
	return n;
}

/* execve along PATH, as execvpe(3) does it; returns the error that tells most. */
static NO_SANITIZE long child_exec(struct job *j)
{
	const char *name = j->argv[0];
	char full[4096 + 256];
	long first = -ENOENT; /* unless a file was there that may not be run */
	size_t n = length(name);

	if (!n)
		return -ENOENT;
	for (const char *p = name; *p; p++)
		if (*p == '/')
			return raw3(SYS_execve, name, j->argv, j->envp);
	if (n > 255)
		return -ENAMETOOLONG;
	for (const char *p = j->path;;) {
		size_t len = 0;
		while (p[len] && p[len] != ':')
			len++;
		if (len < 4096) {
			char *to = full;
			for (size_t i = 0; i < len; i++)
				*to++ = p[i];
			if (len) /* an empty element is the working directory */
				*to++ = '/';
			for (size_t i = 0; i <= n; i++)
				to[i] = name[i];
			long e = raw3(SYS_execve, full, j->argv, j->envp);
			if (e == -EACCES)
				first = e;
			else if (e != -ENOENT && e != -ENOTDIR)
				return e;
		}
		if (!p[len])
			return first;
		p += len + 1;
	}
}

static NO_SANITIZE void child_main(void *arg)
{
	struct job *j = arg;
	const struct vj_rlimit tag = {j->tag, j->tag};
	long e;

	if ((e = raw4(SYS_prlimit64, 0, RLIMIT_RTTIME, &tag, 0)) < 0)
		child_fail(j, STAGE_SETUP, e);
	if (j->kind == JOB_EXEC)
		raw2(SYS_setpgid, 0, 0);
	else
		raw0(SYS_setsid);
	if (j->tty >= 0) {
		if ((e = raw3(SYS_ioctl, j->tty, TIOCSCTTY, 0)) < 0)
			child_fail(j, STAGE_SETUP, e);
		for (int i = 0; i < 3; i++)
			raw3(SYS_dup3, j->tty, i, 0);
	}
	/* Descriptors 0 to 3 are always taken in the worker, so none of these is overwritten before its turn. */
	for (int i = 0; i < j->nfds; i++)
		if ((e = raw3(SYS_dup3, j->fds[i], i, 0)) < 0)
			child_fail(j, STAGE_SETUP, e);
	if (worker.scope_fd >= 0 && (e = raw2(SYS_landlock_restrict_self, worker.scope_fd, 0)) < 0)
		child_fail(j, STAGE_SETUP, e);
	/* Everything else is close-on-exec already; this is the second lock on that door. */
	if (j->kind == JOB_EXEC)
		raw3(SYS_close_range, j->nfds > 3 ? 4 : 3, ~0U, 0);
	if (j->cwd && (e = raw1(SYS_chdir, j->cwd)) < 0)
		child_fail(j, STAGE_CWD, e);
	for (int i = 0; i < worker.ncmd_limits; i++)
		if ((worker.cmd_limits[i].resource != RLIMIT_CPU || !j->cpu_ms) &&
		    (e = raw4(SYS_prlimit64, 0, worker.cmd_limits[i].resource, &worker.cmd_limits[i].value, 0)) < 0)
			child_fail(j, STAGE_SETUP, e);
	if (j->cpu_ms) {
		const struct vj_rlimit cpu = {(j->cpu_ms + 999) / 1000, (j->cpu_ms + 999) / 1000 + 1};
		raw4(SYS_prlimit64, 0, RLIMIT_CPU, &cpu, 0);
	}
	/* No signal is ignored in the worker and execve resets the handled one; only the mask is inherited. */
	const uint64_t none = 0;
	raw4(SYS_rt_sigprocmask, SIG_SETMASK, &none, 0, VJ_SIGSET_BYTES);
	e = child_exec(j);
	child_fail(j, STAGE_EXEC, e);
}

/* ---- the start ---- */

const char *path_of(char **env)
{
	for (; *env; env++)
		if (strncmp(*env, "PATH=", 5) == 0)
			return *env + 5;
	return "/usr/local/bin:/usr/bin:/bin";
}

/* One call for the three or four neighbours that a message brings; a kernel before 5.9 needs one each. */
void close_fds(const int *fds, int n)
{
	if (n > 1 && fds[n - 1] == fds[0] + n - 1 && raw3(SYS_close_range, fds[0], fds[n - 1], 0) == 0)
		return;
	for (int i = 0; i < n; i++)
		raw1(SYS_close, fds[i]);
}

int job_start(struct lane *l, struct slab *s, const struct request *q, enum job_kind kind, int *fds, int nfds,
	      int tty, struct job **out)
{
	int pipe_fds[2] = {-1, -1}, given = nfds;
	int e = 0;

	if (!q->argv || !q->argv[0])
		return -EINVAL;
	if (tty < 0 && nfds != 3 + (q->script ? 1 : 0) + (q->status ? 1 : 0))
		return -EBADF;
	if (kind != JOB_EXEC && pipe2(pipe_fds, O_CLOEXEC) < 0)
		return -errno;
	struct job *j = job_new();
	if (!j) {
		if (pipe_fds[0] >= 0)
			close_fds(pipe_fds, 2);
		return -EAGAIN;
	}
	j->kind = kind;
	j->id = q->id;
	j->lane = lane_ref(l);
	j->slab = s;
	j->argv = q->argv;
	j->envp = q->envp ? q->envp : worker.env;
	j->path = q->envp ? path_of(q->envp) : worker.path;
	j->cwd = q->cwd;
	j->keep = q->keep;
	j->cpu_ms = q->cpu_ms;
	j->tty = tty;
	if (q->status)
		nfds--; /* the last one is the worker's */
	memcpy(j->fds, fds, (size_t)nfds * sizeof *fds);
	j->nfds = nfds;
	j->state = JOB_RUNNING;
	j->start_ns = now_ns();
	if (q->timeout_ms) {
		j->deadline_ns = j->start_ns + q->timeout_ms * UINT64_C(1000000);
		if (q->timeout_ms > UINT64_C(1000) * 86400 * 365)
			j->deadline_ns = 0;
	}
	long pid = raw_clone(CLONE_VM | SIGCHLD, s->stack_top, child_main, j);
	if (pid < 0) {
		e = (int)pid;
		goto fail;
	}
	j->pid = j->leader = (pid_t)pid;
	close_fds(fds, given - (q->status ? 1 : 0));
	if (j->deadline_ns)
		loop_wake_at(j->deadline_ns);
	sampler_start(j);
	if (q->status && (e = source_add(&j->status, SRC_STATUS, fds[nfds], 0, j)) < 0) {
		j->status.fd = fds[nfds]; /* unwatched, but still answered */
		e = 0;
	}
	if (kind != JOB_EXEC) {
		raw1(SYS_close, pipe_fds[1]);
		if (source_add(&j->exec_pipe, SRC_EXEC_PIPE, pipe_fds[0], POLLIN, j) < 0) {
			close(pipe_fds[0]);
			job_kill(j);
		}
	}
	*out = j;
	return 0;
fail:
	if (pipe_fds[0] >= 0)
		close_fds(pipe_fds, 2);
	j->slab = NULL; /* stays with the caller */
	job_free(j);
	return e;
}
