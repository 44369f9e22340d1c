/* reap.c — the end of a command: what ended, what its tree left behind, the reply.
 *
 * A child counts as ended only when it exited or was killed. After the leader everything with its tag is killed, again
 * and again until a walk over /proc finds nothing; "no child at all" (wait4 says ECHILD) is the short way, because
 * every descendant whose parent ended becomes a child of the worker, as pid 1 or as subreaper.
 */
#include "worker.h"

#include "rawsys.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define GIVE_UP_NS (1000 * MS) /* then the reply goes out and names what is stuck */
#define SWEEP_BUDGET 512       /* processes looked at before the loop may go on */
#define ZOMBIE_AFTER 3         /* walks; from then on a zombie that another process holds is not waited for */
#define SLOW_AFTER 50          /* walks; what is stuck then is looked at every 20 ms */

static struct {
	struct scan scan;
	bool active; /* a walk is under way */
	bool again;  /* a child ended meanwhile: its children may lie behind the walk */
	uint64_t next_ns;
} sweep;

int job_scan_open(void)
{
	return scan_open(&sweep.scan);
}

/* ---- the reply ---- */

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

static uint64_t micros(struct timeval t)
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
	unsigned collected = j->chan ? (unsigned)chan_collected(j->chan) : 0;
	mp_write_map(w, 8u + (j->kind != JOB_EXEC) + (j->nviolations > 0) + 2 * collected);
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
	pair_uint(w, "user_us", micros(j->usage.ru_utime));
	pair_uint(w, "sys_us", micros(j->usage.ru_stime));
	pair_uint(w, "max_rss", (uint64_t)j->usage.ru_maxrss * 1024);
	pair_uint(w, "read", (uint64_t)j->usage.ru_inblock * 512);
	pair_uint(w, "written", (uint64_t)j->usage.ru_oublock * 512);
	pair_uint(w, "procs", 1 + (uint64_t)j->killed);
	if (collected)
		chan_write_collected(j->chan, w);
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

static void answer(struct job *j)
{
	uint8_t little[1024];
	static uint8_t *large; /* for replies that carry output; mapped when the first one does */
	struct mp_writer w;

	if (j->answered)
		return;
	j->answered = true;
	if (WIFSIGNALED(j->wait_status) && WTERMSIG(j->wait_status) == SIGXFSZ)
		job_violation(j, "limit", "disk", 0, 0);
	if (WIFSIGNALED(j->wait_status) && WTERMSIG(j->wait_status) == SIGXCPU)
		job_violation(j, "limit", "cpu", j->cpu_ms, micros(j->usage.ru_utime) / 1000);
	if (!j->end_ns)
		j->end_ns = now_ns();
	mp_writer_init(&w, little, sizeof little);
	if (j->chan && chan_collected(j->chan)) {
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

/* Nothing of it is left, or a second has passed: the caller gets the answer. */
static void job_done(struct job *j, bool alone)
{
	/* The end is the last that is said about a call: first comes all of its output. */
	if (j->chan && !j->answered && !chan_finish(j->chan)) {
		j->drained_alone = alone;
		j->state = JOB_DRAINING;
		return;
	}
	answer(j);
	/* An unreaped leader still owns the slab; a kept tree owns its tag. */
	if (!j->pid && (alone || !j->keep))
		job_free(j);
	else
		j->state = JOB_KEPT;
}

void job_drained(struct job *j)
{
	job_done(j, j->drained_alone);
}

/* ---- killing ---- */

void job_kill(struct job *j)
{
	if (j->state == JOB_DRAINING) { /* its output is not wanted any more */
		chan_discard(j->chan);
		job_drained(j);
		return;
	}
	if (j->state == JOB_KEPT) { /* answered long ago */
		j->keep = false;
		sweep.next_ns = 1;
		loop_wake_at(1);
	}
	if (j->state != JOB_RUNNING)
		return;
	j->keep = false;
	j->state = JOB_ENDING;
	j->give_up_ns = now_ns() + GIVE_UP_NS;
	if (j->pid) {
		kill(-j->pid, SIGKILL);
		kill(j->pid, SIGKILL); /* it may not have its group yet */
	}
	sweep.next_ns = 1;
	loop_wake_at(1);
}

void job_cancel_lane(struct lane_ref ref)
{
	for (int i = jobs_active() - 1; i >= 0; i--) {
		struct job *j = jobs_active_at(i);
		if (j->lane.index == ref.index && j->lane.gen == ref.gen && j->state == JOB_RUNNING) {
			j->cancelled = true;
			job_kill(j);
		}
	}
}

int job_signal(struct job *j, int signo, bool tree)
{
	pid_t pid;
	uint64_t tag;
	int n = 0;

	if (signo < 0 || signo > 64)
		return -EINVAL;
	if (!tree)
		return !j->pid ? -ESRCH : kill(j->pid, signo) < 0 ? -errno : 0;
	sweep.active = false; /* one walk at a time: a sweep under way starts again */
	for (scan_begin(&sweep.scan); scan_next(&sweep.scan, &pid, &tag);)
		n += tag == j->tag && kill(pid, signo) == 0;
	return n ? 0 : -ESRCH;
}

static bool ending(const struct job *j)
{
	return j->state == JOB_ENDING || (j->state == JOB_KEPT && !j->keep);
}

/* One process of a walk. */
static void visit(pid_t pid, uint64_t tag)
{
	struct job *j = job_by_tag(tag);

	if (tag == VJ_UNTAGGED || (j && !ending(j)))
		return; /* the host's own, a neighbour's, or kept */
	if ((!j || j->walks == 0 || j->walks > ZOMBIE_AFTER) && process_is_zombie(&sweep.scan, pid))
		return;
	bool sent = kill(pid, SIGKILL) == 0;
	if (j) {
		j->seen++;
		j->killed += sent && j->walks == 0 && pid != j->pid; /* later walks meet the same ones again */
		return;
	}
	/* A tag that nobody holds was made inside: its process ends, and whoever is ending now reports it. */
	for (int i = 0; i < jobs_active(); i++)
		if (jobs_active_at(i)->state == JOB_ENDING)
			job_violation(jobs_active_at(i), "process", "tag_forged", 0, (uint64_t)pid);
}

/* What a complete walk has shown. */
static void walked(bool clean)
{
	bool more = false;
	uint64_t pause = 20 * MS;

	for (int i = jobs_active() - 1; i >= 0; i--) {
		struct job *j = jobs_active_at(i);
		if (!ending(j))
			continue;
		j->walks += j->in_pass;
		if (j->in_pass && !j->seen && !j->pid && (clean || j->walks > 2))
			job_done(j, true);
		else
			pause = j->walks < SLOW_AFTER ? MS : pause, more = true;
	}
	sweep.active = false;
	sweep.next_ns = more ? now_ns() + pause : 0;
	if (more)
		loop_wake_at(sweep.next_ns);
}

static void job_sweep(void)
{
	pid_t pid;
	uint64_t tag;

	if (!sweep.active) {
		bool any = false;
		for (int i = 0; i < jobs_active(); i++) {
			struct job *j = jobs_active_at(i);
			j->seen = 0;
			j->in_pass = ending(j);
			any |= j->in_pass;
		}
		sweep.next_ns = 0;
		if (!any)
			return;
		sweep.active = true;
		sweep.again = false;
		scan_begin(&sweep.scan);
	}
	for (int budget = SWEEP_BUDGET; scan_next(&sweep.scan, &pid, &tag); budget--) {
		visit(pid, tag);
		if (budget == 0) {
			sweep.next_ns = 1;
			loop_wake_at(1);
			return;
		}
	}
	/* A process that ended between its name and its tag may have left a child behind the walk: look once more. */
	walked(!sweep.scan.vanished && !sweep.again);
}

void job_timers(uint64_t now)
{
	bool any = false;

	for (int i = jobs_active() - 1; i >= 0; i--) {
		struct job *j = jobs_active_at(i);
		if (j->state == JOB_RUNNING && j->deadline_ns) {
			if (j->deadline_ns <= now) {
				j->timed_out = true;
				job_kill(j);
			} else
				loop_wake_at(j->deadline_ns);
		}
		if (!ending(j))
			continue;
		any = true;
		if (j->state == JOB_ENDING && j->give_up_ns <= now)
			job_done(j, false);
	}
	if (!any)
		return;
	if (sweep.active || sweep.next_ns <= now)
		job_sweep();
	else
		loop_wake_at(sweep.next_ns);
}

/* ---- reaping ---- */

static struct job *by_pid(pid_t pid)
{
	for (int i = jobs_active() - 1; i >= 0; i--)
		if (jobs_active_at(i)->pid == pid)
			return jobs_active_at(i);
	return NULL;
}

/* A child made this process its tracer (PTRACE_TRACEME): let it go on as if nobody traced it. */
static void trapped(pid_t pid, int status)
{
	long signo = status >> 16 ? 0 : WSTOPSIG(status) & 0x7f;
	siginfo_t info;

	/* The trap of its own exec exists only under a tracer; any other signal is delivered. */
	if (signo == SIGTRAP && raw4(SYS_ptrace, PTRACE_GETSIGINFO, pid, 0, &info) == 0 &&
	    info.si_code == SI_USER && info.si_pid == pid)
		signo = 0;
	struct job *j = by_pid(pid);
	if (!j)
		j = job_by_tag(process_tag(pid));
	raw4(SYS_ptrace, PTRACE_DETACH, pid, 0, signo);
	if (j)
		job_violation(j, "process", "ptrace_worker", 0, (uint64_t)pid);
}

static void leader_gone(struct job *j, int status, const struct rusage *ru)
{
	if (j->exec_pipe.slot >= 0)
		job_exec_done(j);
	j->pid = 0;
	j->wait_status = status;
	j->usage = *ru;
	j->end_ns = now_ns();
	slab_put(j->slab);
	j->slab = NULL;
	if (j->state == JOB_RUNNING) {
		j->state = JOB_ENDING;
		j->give_up_ns = j->end_ns + GIVE_UP_NS;
	}
}

void job_reap(void)
{
	int status;
	struct rusage ru;
	long pid;
	bool due = false;

	while ((pid = raw4(SYS_wait4, -1, &status, WNOHANG | __WALL, &ru)) > 0 || pid == -EINTR) {
		if (pid < 0)
			continue;
		due = true;
		if (WIFSTOPPED(status)) {
			trapped((pid_t)pid, status);
			continue;
		}
		struct job *j = by_pid((pid_t)pid);
		if (j)
			leader_gone(j, status, &ru);
	}
	if (!due)
		return;
	bool alone = pid == -ECHILD, walk = false;
	for (int i = jobs_active() - 1; i >= 0; i--) {
		struct job *j = jobs_active_at(i);
		if (j->state == JOB_DRAINING)
			continue;
		if (alone && !j->pid)
			job_done(j, true);
		else if (j->state == JOB_ENDING && !j->pid && j->keep)
			job_done(j, false);
		else
			walk |= ending(j);
	}
	if (walk) {
		sweep.again = true;
		job_sweep();
	}
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

void worker_exit(int code)
{
	/* The kernel kills everything in the namespace of a pid 1; anywhere else it is done here. */
	if (!worker.pid1 && jobs_active()) {
		uint64_t until = now_ns() + GIVE_UP_NS;
		int status;
		for (bool found = true; found && now_ns() < until;) {
			pid_t pid;
			uint64_t tag;
			found = false;
			for (scan_begin(&sweep.scan); scan_next(&sweep.scan, &pid, &tag);)
				if (tag != VJ_UNTAGGED && job_by_tag(tag) && !process_is_zombie(&sweep.scan, pid))
					found |= kill(pid, SIGKILL) == 0;
			while (raw4(SYS_wait4, -1, &status, WNOHANG | __WALL, 0) > 0)
				continue;
		}
	}
	_exit(code);
}
