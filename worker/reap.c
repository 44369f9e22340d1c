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
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define GIVE_UP_NS (1000 * MS) /* then the reply goes out and names what is stuck */
#define SWEEP_BUDGET 512       /* processes looked at before the loop may go on */
#define ZOMBIE_AFTER 3         /* walks; from then on a zombie that another process holds is not waited for */
#define FREEZE_AFTER 4         /* walks; from then on a tree that still has so many and grows is held still */
#define FREEZE_FROM 16
#define SLOW_AFTER 50          /* walks; what is stuck then is looked at every 20 ms */

static struct {
	struct scan scan;
	int last_pid_fd;
	bool active; /* a walk is under way */
	bool frozen; /* everything in the jail was stopped for this walk */
	pid_t newest; /* the last that was born in the jail before a walk */
	bool again;  /* a child ended meanwhile: its children may lie behind the walk */
	uint64_t next_ns;
} sweep;

int job_scan_open(void)
{
	sweep.last_pid_fd = worker.pid1 ? last_pid_open() : -1;
	return scan_open(&sweep.scan);
}

/* Nothing of it is left, or a second has passed: the caller gets the answer. */
static void job_done(struct job *j, bool alone)
{
	/* The end is the last that is said about a call: first comes all of its output. */
	if (j->chan && !j->answered && !chan_finish(j->chan) && !j->cancelled) {
		j->drained_alone = alone;
		j->state = JOB_DRAINING;
		return;
	}
	sampler_ended(j);
	job_answer(j);
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

static bool ending(const struct job *j)
{
	return j->state == JOB_ENDING || (j->state == JOB_KEPT && !j->keep);
}

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

/* Everything in the jail at once when all of it is to end: a walk may lose against processes that keep forking. */
void job_kill_jail(void)
{
	if (!worker.pid1)
		return;
	for (int i = 0; i < jobs_active(); i++) {
		const struct job *j = jobs_active_at(i);
		if (!ending(j) && j->state != JOB_DRAINING)
			return;
	}
	kill(-1, SIGKILL);
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
	if (sweep.frozen) {
		kill(-1, SIGCONT);
		sweep.frozen = false;
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
		bool any = false, again = false, freeze = false;
		for (int i = 0; i < jobs_active(); i++) {
			struct job *j = jobs_active_at(i);
			j->in_pass = ending(j);
			any |= j->in_pass;
			again |= j->in_pass && j->walks;
			freeze |= j->in_pass && j->walks >= FREEZE_AFTER && j->seen >= FREEZE_FROM;
			j->seen = 0;
		}
		sweep.next_ns = 0;
		if (!any)
			return;
		if (again)
			job_kill_jail();
		/* What forks faster than a walk finds it, beside a neighbour that must live: nothing moves meanwhile. */
		if (freeze && worker.pid1) {
			pid_t newest = last_pid(sweep.last_pid_fd);
			if (newest != sweep.newest || !newest)
				sweep.frozen |= kill(-1, SIGSTOP) == 0;
			sweep.newest = newest;
		}
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
		j = job_by_tag(process_tag(&sweep.scan, pid));
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

/* Whose an orphan was that was never looked at; NULL when it could be several calls'. */
static struct job *only_running(void)
{
	struct job *found = NULL;
	for (int i = 0; i < jobs_active(); i++) {
		if (jobs_active_at(i)->state != JOB_RUNNING)
			continue;
		if (found)
			return NULL;
		found = jobs_active_at(i);
	}
	return found;
}

/* Nothing was born in the jail since its leader: the short way when neighbours live. */
static bool had_no_child(const struct job *j)
{
	return sweep.last_pid_fd >= 0 && last_pid(sweep.last_pid_fd) == j->leader;
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
		else if ((j = sampler_owner((pid_t)pid)) || (j = only_running()))
			j->orphan_us += micros(ru.ru_utime) + micros(ru.ru_stime);
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
		else if (j->state == JOB_ENDING && !j->pid && !j->walks && had_no_child(j))
			job_done(j, true);
		else
			walk |= ending(j);
	}
	if (walk) {
		sweep.again = true;
		job_sweep();
	}
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
				if (tag != VJ_UNTAGGED && !process_is_zombie(&sweep.scan, pid))
					found |= kill(pid, SIGKILL) == 0;
			while (raw4(SYS_wait4, -1, &status, WNOHANG | __WALL, 0) > 0)
				continue;
		}
	}
	_exit(code);
}
