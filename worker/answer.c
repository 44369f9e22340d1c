/* answer.c — what the host is told about a command: that it started, and how it ended. */
#include "worker.h"

#include "rawsys.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

void job_violation(struct job *j, const char *kind, const char *what, uint64_t limit, uint64_t observed)
{
	for (int i = 0; i < j->nviolations; i++)
		if (!strcmp(j->violations[i].kind, kind) && !strcmp(j->violations[i].what, what))
			return;
	if (j->nviolations < VJ_VIOLATIONS_MAX)
		j->violations[j->nviolations++] = (struct violation){kind, what, limit, observed};
}

static void pair_uint(struct mp_writer *w, const char *key, uint64_t v)
{
	mp_write_str(w, key);
	mp_write_uint(w, v);
}

static void pair_str(struct mp_writer *w, const char *key, const char *v)
{
	mp_write_str(w, key);
	mp_write_str(w, v);
}

uint64_t micros(struct timeval t)
{
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_usec;
}

static void write_end(const struct job *j, struct mp_writer *w)
{
	static const char *const stages[] = {"", "exec", "cwd", "setup"};
	int signo = WIFSIGNALED(j->wait_status) ? WTERMSIG(j->wait_status) : 0;
	int code = signo ? 128 + signo : WEXITSTATUS(j->wait_status);

	if (j->pid) /* it could not be killed within the second */
		signo = SIGKILL, code = 128 + SIGKILL;
	if (j->timed_out)
		code = 124;
	struct kept *kept = j->chan ? chan_kept(j->chan) : NULL;
	mp_write_map(w, 8u + (j->kind != JOB_EXEC) + (j->nviolations > 0) + (kept ? 2u * (unsigned)kept->streams : 0));
	mp_write_str(w, "id");
	mp_write_int(w, j->id);
	if (j->kind != JOB_EXEC)
		pair_str(w, "event", "exit");
	pair_uint(w, "exit_code", (uint64_t)code);
	pair_uint(w, "signal", (uint64_t)signo);
	mp_write_str(w, "timed_out");
	mp_write_bool(w, j->timed_out);
	pair_uint(w, "exec_errno", (uint64_t)j->exec_errno);
	pair_str(w, "stage", j->exec_errno ? stages[j->stage & 3] : "");
	pair_uint(w, "leftovers", j->killed);
	mp_write_str(w, "usage");
	mp_write_map(w, 7);
	pair_uint(w, "wall_us", (j->end_ns - j->start_ns) / 1000);
	pair_uint(w, "user_us", micros(j->usage.ru_utime) + j->orphan_us);
	pair_uint(w, "sys_us", micros(j->usage.ru_stime));
	uint64_t one = (uint64_t)j->usage.ru_maxrss * 1024; /* of the largest process; the sampler knows the tree */
	pair_uint(w, "max_rss", one > j->peak_memory ? one : j->peak_memory);
	pair_uint(w, "read", (uint64_t)j->usage.ru_inblock * 512);
	pair_uint(w, "written", (uint64_t)j->usage.ru_oublock * 512);
	pair_uint(w, "procs", j->peak_procs > 1 + j->killed ? j->peak_procs : 1 + j->killed);
	if (kept)
		kept_write(kept, w);
	if (!j->nviolations)
		return;
	mp_write_str(w, "violations");
	mp_write_array(w, j->nviolations);
	for (int i = 0; i < j->nviolations; i++) {
		mp_write_map(w, 4);
		pair_str(w, "kind", j->violations[i].kind);
		pair_str(w, "what", j->violations[i].what);
		pair_uint(w, "limit", j->violations[i].limit);
		pair_uint(w, "observed", j->violations[i].observed);
	}
}

/* By this signal, or, where there is such a limit, as the shell that it ran in says it. */
static bool ended_by(int status, int signo, bool limited)
{
	return (WIFSIGNALED(status) && WTERMSIG(status) == signo) ||
	       (limited && WIFEXITED(status) && WEXITSTATUS(status) == 128 + signo);
}

void job_answer(struct job *j)
{
	uint8_t little[1024];
	static uint8_t *large; /* for replies that carry output; mapped when the first one does */
	struct mp_writer w;

	if (j->answered)
		return;
	j->answered = true;
	if (ended_by(j->wait_status, SIGXFSZ, worker.limit_disk != 0))
		job_violation(j, "limit", "disk", worker.limit_disk, worker.limit_disk);
	if (ended_by(j->wait_status, SIGXCPU, j->cpu_ms != 0))
		job_violation(j, "limit", "cpu", j->cpu_ms, micros(j->usage.ru_utime) / 1000);
	if (!j->end_ns)
		j->end_ns = now_ns();
	mp_writer_init(&w, little, sizeof little);
	if (j->chan && chan_kept(j->chan)) {
		if (!large)
			large = mmap(NULL, VJ_FRAME_MAX, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (large == MAP_FAILED)
			worker_exit(1);
		mp_writer_init(&w, large, VJ_FRAME_MAX);
	}
	write_end(j, &w);
	if (j->status.fd >= 0)
		raw3(SYS_write, j->status.fd, w.buf, w.len);
	struct lane *l = lane_get(j->lane);
	if (l && j->status.fd < 0)
		lane_send(l, &w, -1);
	if (w.buf == large && w.len > 1024 * 1024)
		madvise(large, VJ_FRAME_MAX, MADV_DONTNEED);
}

void job_exec_done(struct job *j)
{
	uint8_t buf[128];
	struct mp_writer w;

	source_close(&j->exec_pipe);
	struct lane *l = lane_get(j->lane);
	mp_writer_init(&w, buf, sizeof buf);
	mp_write_map(&w, 4);
	mp_write_str(&w, "id");
	mp_write_int(&w, j->id);
	pair_str(&w, "event", "started");
	pair_uint(&w, "pid", (uint64_t)j->pid);
	pair_uint(&w, "exec_errno", (uint64_t)j->exec_errno);
	if (l)
		lane_send(l, &w, j->master);
	if (j->master >= 0)
		close(j->master);
	j->master = -1;
}
