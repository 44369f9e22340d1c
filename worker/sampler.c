/* sampler.c — memory, processes and written bytes of the whole jail, and processor time of a call's whole tree, where
 * no cgroup bounds them.
 *
 * While commands run, their processes are looked at every 20 ms, or so rarely that the looking costs at most a
 * fiftieth of the time; once half of the memory is in use, every 10 ms and a tenth. Above a limit the tree of the call
 * that has most of it is killed. What cannot be read is not counted; memory shared after a fork is counted by share
 * only once the plain sum is above the limit.
 * Sources: proc(5), statfs(2).
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MS UINT64_C(1000000)
#define INTERVAL_MIN (20 * MS)
#define COST_FACTOR 50
#define SLICE 32       /* processes looked at before the loop goes on */
#define MEMFD_EVERY 10 /* rounds, unless there are few tasks */
#define MEMFD_FEW 16
#define INTERVAL_MAX (1000 * MS)

#define TICK_SLACK (20 * MS) /* the kernel tells a process's start in hundredths of a second */
#define CPU_EVERY 5    /* rounds */
#define OWNERS 256     /* processes that are remembered with their call */

enum what { MEMORY, PIDS, DISK };

static struct {
	struct scan scan;
	bool opened, busy, walking, memfds, cpu;
	struct {
		pid_t pid;
		uint64_t tag;
	} owners[OWNERS];
	unsigned round, ntasks;
	uint64_t next_ns, cost_ns;
	uint64_t memory, written;     /* of this round */
	uint64_t memfd_memory;        /* of the last round that looked at descriptors */
	uint64_t memfd_now;
	bool settle;                  /* a call was ended for what it wrote, and is not gone yet */
	bool rebase;                  /* a command began while no other ran */
	uint64_t reaped_base, reaped; /* written by children that have ended: when it began, and at the last look */
	uint64_t blocks_base;         /* of the file system of the workspace, at the first look after it began */
	struct inodes seen; /* memfds of this round */
} s;

/* What the looking costs: not the time in which others had the processor. */
static uint64_t cpu_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static uint64_t own_written(void)
{
	char text[512];
	if (worker.io_fd < 0)
		return 0;
	long n = raw4(SYS_pread64, worker.io_fd, text, sizeof text - 1, 0);
	text[n > 0 ? n : 0] = 0;
	return text_field(text, "\nwrite_bytes:");
}

static uint64_t amount(const struct job *j, enum what what)
{
	return what == MEMORY ? j->memory : what == PIDS ? j->tasks : j->written;
}

/* What it still has is on its way out, and not its neighbours' fault. */
static bool ending(const struct job *j)
{
	return j && (j->state == JOB_ENDING || (j->state == JOB_KEPT && !j->keep));
}

/* The call that has most of it ends; true when there was one. */
static bool breach(enum what what, uint64_t limit, uint64_t observed)
{
	static const char *const names[] = {"memory", "pids", "disk"};
	struct job *worst = NULL;

	for (int i = 0; i < jobs_active(); i++) {
		struct job *j = jobs_active_at(i);
		if ((j->state == JOB_RUNNING || j->state == JOB_KEPT) &&
		    (!worst || amount(j, what) > amount(worst, what)))
			worst = j;
	}
	if (!worst)
		return false;
	job_violation(worst, "limit", names[what], limit, observed);
	s.settle |= what == DISK;
	if (what == MEMORY)
		s.memfd_memory = 0; /* looked at again before it counts */
	job_kill(worst);
	job_kill_jail();
	return true;
}

/* The sum again, each page by share: what a fork shares was counted once for each process. */
static uint64_t exact_memory(void)
{
	pid_t pid;
	uint64_t tag, sum = 0;

	for (int i = 0; i < jobs_active(); i++)
		jobs_active_at(i)->memory = 0;
	for (scan_begin(&s.scan); scan_next(&s.scan, &pid, &tag);) {
		struct job *j = tag == VJ_UNTAGGED ? NULL : job_by_tag(tag);
		if ((!worker.pid1 && !j) || ending(j))
			continue;
		uint64_t m = process_share(s.scan.fd, pid);
		if (j)
			j->memory += m;
		sum += m;
	}
	return sum;
}

/* The most of each that a call had; and the end of one whose tree used up its processor time. */
static void note_jobs(void)
{
	for (int i = jobs_active() - 1; i >= 0; i--) {
		struct job *j = jobs_active_at(i);
		if (j->procs > j->peak_procs)
			j->peak_procs = j->procs;
		if (j->memory > j->peak_memory)
			j->peak_memory = j->memory;
		if (s.cpu && j->cpu_ms && j->state == JOB_RUNNING && j->cpu_us / 1000 > j->cpu_ms) {
			job_violation(j, "limit", "cpu", j->cpu_ms, j->cpu_us / 1000);
			job_kill(j);
		}
	}
}

struct job *sampler_owner(pid_t pid)
{
	const unsigned i = (unsigned)pid % OWNERS;
	return s.owners[i].pid == pid ? job_by_tag(s.owners[i].tag) : NULL;
}

static void judge(void)
{
	uint64_t other = s.memfd_memory + (worker.limit_memory ? places_used() : 0);

	if (worker.limit_memory && s.memory + other > worker.limit_memory) {
		uint64_t observed = exact_memory() + other;
		if (observed > worker.limit_memory)
			breach(MEMORY, worker.limit_memory, observed);
	}
	if (worker.limit_pids && s.ntasks > worker.limit_pids)
		breach(PIDS, worker.limit_pids, s.ntasks);
	if (worker.limit_disk) {
		uint64_t used = blocks_used();
		bool leaving = false;
		for (int i = 0; i < jobs_active(); i++)
			leaving |= ending(jobs_active_at(i));
		if (s.settle && !leaving) { /* what the ended call has written is not the others' */
			s.reaped = own_written();
			s.rebase = true;
			s.settle = false;
		}
		if (s.rebase) {
			s.reaped_base = s.reaped;
			s.blocks_base = used;
			s.rebase = false;
		}
		s.reaped = own_written();
		uint64_t sum = s.written + (s.reaped > s.reaped_base ? s.reaped - s.reaped_base : 0);
		uint64_t grown = used > s.blocks_base ? used - s.blocks_base : 0;
		/* Children of a parent that ignores SIGCHLD are added to nobody; the file system knows, but it knows
		 * the host's writers as well, so it decides only far above the limit. */
		if (s.settle)
			return;
		if (sum > worker.limit_disk)
			breach(DISK, worker.limit_disk, sum);
		else if (grown / 2 > worker.limit_disk)
			breach(DISK, worker.limit_disk, grown);
	}
}

static void begin_walk(void)
{
	bool cpu = false;

	for (int i = 0; i < jobs_active(); i++) {
		struct job *j = jobs_active_at(i);
		j->memory = j->written = 0;
		j->procs = j->tasks = 0;
		cpu |= j->cpu_ms != 0;
	}
	s.memory = s.written = s.memfd_now = s.cost_ns = 0;
	s.memfds = worker.limit_memory && (s.ntasks <= MEMFD_FEW || s.round % MEMFD_EVERY == 0);
	s.ntasks = s.seen.n = 0;
	s.cpu = cpu && s.round % CPU_EVERY == 0;
	s.round++;
	for (int i = 0; s.cpu && i < jobs_active(); i++)
		jobs_active_at(i)->cpu_us = jobs_active_at(i)->orphan_us;
	s.walking = true;
	scan_begin(&s.scan);
}

/* A process that is older than the call whose tag it shows has put itself there, to outlive its own. */
static bool older_than(pid_t pid, const struct job *j)
{
	uint64_t born = process_started_ns(s.scan.fd, pid);
	uint64_t began = boot_ns() - (now_ns() - j->start_ns);
	return born && born + TICK_SLACK < began;
}

/* Counts processes and nothing else: among ones that multiply the worker seldom gets to run, so the first thing it
 * does then must be enough. True when a call was ended. */
static bool too_many(void)
{
	uint64_t found = 0, tag;
	pid_t pid;

	if (!worker.limit_pids)
		return false;
	for (scan_begin(&s.scan); found <= 2 * worker.limit_pids && scan_next(&s.scan, &pid, &tag);) {
		struct job *j = tag == VJ_UNTAGGED ? NULL : job_by_tag(tag);
		if ((!worker.pid1 && !j) || ending(j))
			continue;
		found++;
		if (j)
			j->tasks++;
	}
	for (int i = 0; i < jobs_active(); i++) {
		struct job *j = jobs_active_at(i);
		j->peak_procs = j->tasks > j->peak_procs ? j->tasks : j->peak_procs;
	}
	return found > worker.limit_pids && breach(PIDS, worker.limit_pids, found);
}

static void look_at(pid_t pid, uint64_t tag)
{
	struct job *j = tag == VJ_UNTAGGED ? NULL : job_by_tag(tag);
	uint64_t memory = 0, written = 0, memfd = 0;
	unsigned tasks = 1;

	if ((!worker.pid1 && !j) || ending(j))
		return; /* the host's; what is being killed */
	if (worker.limit_memory || worker.limit_pids)
		memory = process_resident(s.scan.fd, pid, &tasks);
	if (s.memfds)
		memfd = process_memfds(s.scan.fd, pid, &s.seen);
	if (worker.limit_disk)
		written = process_written(s.scan.fd, pid);
	s.memory += memory;
	s.memfd_now += memfd;
	s.written += written;
	s.ntasks += tasks;
	if (!j)
		return;
	j->memory += memory + memfd;
	j->written += written;
	j->procs++;
	j->tasks += tasks;
	if (s.cpu)
		j->cpu_us += process_cpu_us(s.scan.fd, pid);
	const unsigned i = (unsigned)pid % OWNERS;
	if ((s.owners[i].pid != pid || s.owners[i].tag != tag) && older_than(pid, j) && kill(pid, SIGKILL) == 0)
		job_violation(j, "process", "tag_forged", 0, (uint64_t)pid);
	s.owners[i].pid = pid;
	s.owners[i].tag = tag;
}

void sampler_start(const struct job *began)
{
	int running = 0;

	if (!(worker.limit_memory || worker.limit_pids || worker.limit_disk || began->cpu_ms))
		return;
	for (int i = 0; i < jobs_active() && running < 2; i++)
		running += jobs_active_at(i)->state == JOB_RUNNING;
	s.rebase |= running == 1; /* the bytes of the calls before it are not its own */
	if (s.busy)
		return;
	if (!s.opened && scan_open(&s.scan) < 0)
		return;
	if (!s.opened)
		places_find();
	s.opened = s.busy = true;
	s.walking = false;
	s.next_ns = began->start_ns + INTERVAL_MIN;
	loop_wake_at(s.next_ns);
}

void sampler_ended(const struct job *j)
{
	/* Its bytes are not the next call's; a short one has hardly any, and pays for no look. */
	if (worker.limit_disk && j->end_ns > j->start_ns + INTERVAL_MIN / 4)
		s.reaped = own_written();
}

void sampler_timers(uint64_t now)
{
	pid_t pid;
	uint64_t tag;
	int left = SLICE;

	if (!s.busy)
		return;
	if (!jobs_active()) {
		s.busy = s.walking = false;
		if (worker.limit_disk)
			s.reaped = own_written();
		return;
	}
	if (!s.walking && s.next_ns > now) {
		loop_wake_at(s.next_ns);
		return;
	}
	if (!s.walking) {
		for (int i = 0; i < jobs_active(); i++)
			jobs_active_at(i)->tasks = 0;
		if (too_many()) {
			s.next_ns = now_ns() + INTERVAL_MIN;
			loop_wake_at(s.next_ns);
			return;
		}
		begin_walk();
	}
	/* Processes that multiply can be ahead of the walk for ever. Past twice the limit it is not a neighbour's. */
	const uint64_t enough = worker.limit_pids ? 2 * worker.limit_pids : UINT64_MAX;
	uint64_t began = cpu_ns();
	while (s.ntasks <= enough && left-- && scan_next(&s.scan, &pid, &tag))
		look_at(pid, tag);
	if (s.ntasks > enough) {
		s.walking = false;
		note_jobs();
		breach(PIDS, worker.limit_pids, s.ntasks);
		s.next_ns = now_ns() + INTERVAL_MIN;
		loop_wake_at(s.next_ns);
		return;
	}
	if (left < 0) { /* more to look at, after what else the loop has to do */
		s.cost_ns += cpu_ns() - began;
		loop_wake_at(1);
		return;
	}
	/* In a jail of uid 0 a command can write this for a half-born one, which shares it with the worker. */
	if (worker.oom_len)
		raw4(SYS_pwrite64, worker.oom_fd, worker.oom_score, worker.oom_len, 0);
	s.walking = false;
	if (s.memfds)
		s.memfd_memory = s.memfd_now;
	note_jobs();
	judge();
	/* Closer to the limit it looks more often. */
	const bool near = s.memory + s.memfd_memory > worker.limit_memory / 2 && worker.limit_memory;
	const uint64_t least = near ? INTERVAL_MIN / 2 : INTERVAL_MIN;
	uint64_t pause = (cpu_ns() - began + s.cost_ns) * (near ? COST_FACTOR / 5 : COST_FACTOR);
	pause = pause < least ? least : pause > INTERVAL_MAX ? INTERVAL_MAX : pause;
	s.next_ns = now_ns() + pause;
	loop_wake_at(s.next_ns);
}
