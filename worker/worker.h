/* worker.h — what the files of the worker share: sources of events, lanes, jobs, requests.
 *
 * The worker is one thread that waits in ppoll(2). Nothing here blocks, nothing allocates by a length that was sent:
 * every table has a fixed size, every job one slab (stack, message, pointers) that is mapped once and used again.
 */
#ifndef VJ_WORKER_H
#define VJ_WORKER_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "msg.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/types.h>

#define VJ_VERSION "0.1.0"
#define VJ_PROTOCOL 1
#define VJ_JOBS_MAX 1024    /* a power of two: the tag of a job carries its index */
#define VJ_LANES_MAX 1024
#define VJ_SOURCES_MAX 8192 /* descriptors that the loop waits on */
#define VJ_FDS_MAX 8        /* descriptors of one message */
#define VJ_SPAWN_FDS 4
#define VJ_VIOLATIONS_MAX 4

/* For code that runs in the child: it shares the worker's memory, but not its stack. */
#if defined(__clang__)
#define NO_SANITIZE __attribute__((no_sanitize("address", "undefined"), no_stack_protector))
#else
#define NO_SANITIZE __attribute__((no_sanitize_address, no_sanitize_undefined))
#endif

#define VJ_ARRAY(x) (sizeof(x) / sizeof((x)[0]))

/* ---- event sources (loop.c) ---- */

enum source_kind {
	SRC_NONE, SRC_SET, SRC_LANE, SRC_EXEC_PIPE, SRC_STATUS, SRC_STREAM_OUT, SRC_CHAN, SRC_HELPER, SRC_LISTEN, SRC_CONNECT
};

struct source {
	enum source_kind kind;
	int slot; /* index in the poll set, -1 = not waited for, -2 = in the epoll set */
	int fd;
	void *owner;
};

int source_add(struct source *s, enum source_kind kind, int fd, short events, void *owner); /* 0 or -ENOSPC */
void source_events(struct source *s, short events);
void source_remove(struct source *s); /* does not close */
void source_close(struct source *s);

int loop_signals(void); /* dispositions and mask; 0 or -errno */
_Noreturn void loop_run(void);
uint64_t now_ns(void); /* CLOCK_MONOTONIC */
void loop_wake_at(uint64_t ns); /* run the timers not later than this */

/* ---- memory of one message and its job (job.c) ---- */

#define SLAB_STACK (32u * 1024)
#define SLAB_POINTERS (VJ_MESSAGE_MAX + 64u)
#define BODY_POINTERS (2u * 1024 * 1024) /* more than the kernel takes as arguments and environment */
#define BODY_SIZE (VJ_FRAME_MAX + 4096u + BODY_POINTERS * sizeof(char *))

struct slab {
	struct slab *next;
	uint8_t *stack_top;
	uint8_t *message;  /* VJ_MESSAGE_MAX bytes and room for a final NUL */
	char **pointers;   /* SLAB_POINTERS of them */
	uint8_t *body;     /* BODY_SIZE bytes for a message that came in a memfd, or NULL */
	uint32_t used;     /* bytes of the message */
};

struct slab *slab_get(void); /* NULL when there is no memory */
void slab_put(struct slab *s);
uint8_t *slab_body(struct slab *s); /* room for VJ_FRAME_MAX bytes and a NUL, then BODY_POINTERS pointers */

/* ---- requests (request.c) ---- */

struct request {
	struct mp_bytes op;
	int64_t id;
	char **argv, **envp; /* NULL = absent; NULL-terminated, inside the slab */
	char *cwd;
	uint64_t timeout_ms, cpu_ms, cap, n, rows, cols, port, bytes;
	int64_t target, signo, fd;
	struct mp_bytes data, path, host;
	bool has_id, has_target, body, keep, merge, script, status, tree, last, want_stdin, has_path;
	/* Where the value of a nested key begins (NULL = absent); mp_reader_init(r, x, end - x) reads it. */
	const uint8_t *end, *listen, *worker_rlimits, *cmd_rlimits, *landlock, *probe, *limits;
	struct mp_bytes seccomp, nonce;
	uint64_t version, lease, umask, cmd_scope;
	bool has_umask;
};

/* One pass over the map; strings are NUL-terminated in place, so the buffer needs one byte after its end. */
int request_parse(struct request *q, void *buf, size_t len, char **pointers, size_t npointers);

/* ---- lanes (lane.c) ---- */

enum lane_kind { LANE_PACKET, LANE_FRAMES, LANE_JSON };

struct lane {
	struct source src;
	enum lane_kind kind;
	uint32_t gen; /* grows each time the entry is used again */
	bool open, main;
	uint64_t credit; /* connections that its egress may still push */
	int64_t egress_id;
};

struct lane_ref {
	uint16_t index;
	uint32_t gen;
};

struct lane *lane_get(struct lane_ref ref); /* NULL when it was dropped meanwhile */
struct lane_ref lane_ref(const struct lane *l);
int lane_open(int fd, enum lane_kind kind, bool main, struct lane **out); /* takes fd when it returns 0 */
void lane_drop(struct lane *l); /* kills what was started from it; the end of the main lane is the worker's */
/* A reply with at most one descriptor (-1 = none); the lane is dropped when it cannot be sent at once. */
void lane_send(struct lane *l, const struct mp_writer *w, int fd);
void lane_ready(struct lane *l, short revents);
/* The slab for the next message, which whoever takes it gives back (or another in its place). */
struct slab *lane_take_spare(void);
void lane_give_spare(struct slab *s);

/* ---- requests answered (dispatch.c) ---- */

/* A message with its descriptors: what dispatch takes it sets to none (slab NULL, nfds 0); the rest is the caller's. */
struct message {
	struct slab *slab;
	uint8_t *buf; /* with room for one byte after its end */
	size_t len;
	int fds[VJ_FDS_MAX], nfds;
};

void dispatch(struct lane *l, struct message *m);
void reply_error(struct lane *l, const struct request *q, int err); /* -errno; q NULL = no id known */
void reply_empty(struct lane *l, const struct request *q);

/* ---- lanes without descriptors (stream.c) ---- */

void stream_send(struct lane *l, const struct mp_writer *w);
void stream_ready(struct lane *l, short revents);
void stream_out_ready(short revents);
void stream_turn(void); /* once in each turn of the loop */
int stream_open(struct lane *l, int out, bool json);
bool stream_congested(void); /* more waits to be written than the host takes */

/* ---- output kept for the reply (collect.c) ---- */

struct kept {
	int streams; /* 1 when standard error goes where standard output goes */
	size_t cap;  /* bytes kept of each */
	uint8_t *buf[2];
	uint64_t total[2];
};

int kept_open(struct kept *k, int streams, uint64_t cap); /* cap 0 = the default; 0 or -ENOMEM */
void kept_close(struct kept *k);
void kept_add(struct kept *k, int i, const uint8_t *p, size_t n);
void kept_write(struct kept *k, struct mp_writer *w); /* two pairs a stream; only once */

/* ---- the pipes of a command behind a stream (chan.c) ---- */

struct chan;
struct job;
enum job_kind { JOB_EXEC, JOB_SPAWN, JOB_TERMINAL };

int chan_open(struct lane *l, const struct request *q, enum job_kind kind, int *fds, struct chan **out);
int chan_terminal(struct lane *l, const struct request *q, int master, struct chan **out); /* takes master */
void chan_attach(struct chan *c, struct job *j);
void chan_close(struct chan *c); /* NULL is fine */
void chan_ready(struct source *s, short revents);
bool chan_finish(struct chan *c); /* reads what is left; false = the host must take more first */
void chan_discard(struct chan *c);
void chan_resume(void);
void chan_credit(struct chan *c, int64_t fd, uint64_t bytes);
int chan_input(struct chan *c, struct mp_bytes data, bool last); /* 0 or -errno */
int chan_resize(struct chan *c, const void *winsize);
struct kept *chan_kept(struct chan *c); /* what the reply carries; NULL when output goes out as events */

/* ---- file calls (helper.c) ---- */

int helper_call(struct lane *l, struct message *m); /* 0, or -errno when the caller must answer */
void helper_done(void);

/* ---- sockets by descriptor (forward.c), the program beside the worker (proxycommand.c) ---- */

int egress_open(struct lane *l, const struct request *q);  /* 0, or -errno when the caller must answer */
int connect_open(struct lane *l, const struct request *q); /* the same */
void egress_credit(struct lane *l, uint64_t n);
void egress_ready(struct source *s);
void connect_ready(struct source *s);
void forward_timers(uint64_t now);
void forward_drop(struct lane_ref ref); /* what was asked for on a lane that is gone */
int proxy_command(const char *target);  /* host:port; the exit status */

/* ---- jobs ---- */

enum job_state {
	JOB_FREE,
	JOB_RUNNING, /* the leader lives (or is a zombie that was not reaped yet) */
	JOB_ENDING,  /* everything with its tag is being killed */
	JOB_DRAINING, /* nothing of it is left but output that the host has not taken */
	JOB_KEPT      /* answered; its processes may live until the jail ends */
};
enum job_stage { STAGE_NONE, STAGE_EXEC, STAGE_CWD, STAGE_SETUP };

struct violation {
	const char *kind, *what;
	uint64_t limit, observed;
};

struct job {
	enum job_state state;
	enum job_kind kind;
	uint64_t tag; /* 2^60 - n; n carries the index of the job in its low bits */
	int64_t id;
	struct lane_ref lane;
	pid_t pid; /* 0 once it was reaped */
	pid_t leader;
	struct slab *slab;
	/* what the child reads, and where it writes why it could not start */
	char **argv, **envp;
	const char *cwd, *path;
	int fds[VJ_SPAWN_FDS], nfds;
	uint64_t cpu_ms;
	volatile int32_t exec_errno, stage;
	struct chan *chan; /* NULL where descriptors travel */
	int tty; /* slave of its terminal, or -1 */
	int master, pts; /* until `started` was sent; the number in /dev/pts */
	/* the end */
	uint64_t start_ns, end_ns, deadline_ns, give_up_ns;
	int wait_status;
	struct rusage usage;
	bool timed_out, cancelled, keep, answered, drained_alone;
	bool in_pass; /* was ending when the present sweep began */
	uint32_t seen, walks, killed;
	uint64_t memory, written, cpu_us; /* at the last look of the sampler */
	uint32_t procs, peak_procs, tasks; /* tasks: threads of all its processes */
	uint64_t peak_memory, orphan_us; /* orphan_us: processor time of descendants that the worker reaped */
	struct source status, exec_pipe;
	uint8_t nviolations;
	struct violation violations[VJ_VIOLATIONS_MAX];
	int active; /* index in the list of live jobs */
};

/* Takes the slab and the descriptors when it returns 0; they stay with the caller otherwise. */
int job_start(struct lane *l, struct slab *s, const struct request *q, enum job_kind kind, int *fds, int nfds,
	      int tty, struct job **out);
void job_free(struct job *j);
struct job *job_find(int64_t id);     /* running or ending; NULL when there is none */
struct job *job_by_tag(uint64_t tag); /* NULL when no job holds it */
int jobs_active(void);
struct job *jobs_active_at(int i);
void job_list(struct mp_writer *w, uint64_t now);
void close_fds(const int *fds, int n);
const char *path_of(char **env); /* the PATH of an environment, or a usual one */

/* ---- the end of jobs (reap.c) ---- */

int job_scan_open(void);                     /* before the first job; 0 or -errno */
void job_reap(void);                         /* takes every ended child, answers what can be answered */
void job_kill(struct job *j);                /* begins the end of its tree */
void job_kill_jail(void);                 /* all of it, when none of it is to live */
void job_cancel_lane(struct lane_ref ref);   /* of every job that was started from this lane */
void job_timers(uint64_t now);               /* deadlines, and what is still ending */
uint64_t micros(struct timeval t);
void job_answer(struct job *j);              /* once; what comes later is not sent */
void job_drained(struct job *j);             /* the host has taken more of its output */
void job_exec_done(struct job *j);           /* the exec pipe of a spawn or terminal was closed */
int job_signal(struct job *j, int signo, bool tree); /* 0 or -errno */
void job_violation(struct job *j, const char *kind, const char *what, uint64_t limit, uint64_t observed);
_Noreturn void worker_exit(int code); /* kills every command first where the kernel would not */

/* ---- the tags of processes (sweep.c) ---- */

#define VJ_TAG_BASE (UINT64_C(1) << 60)
#define VJ_TAG_SPAN (UINT64_C(1) << 37) /* tags that one worker can give away: 2^27 jobs of 2^10 slots */

/* The highest tag of this worker. As pid 1 every process it sees is its own; without a pid namespace other workers'
 * commands are in sight too, so each worker counts in a range of its own, by its pid (pid_max is at most 2^22). */
uint64_t tag_base(void);

#define VJ_UNTAGGED UINT64_MAX

struct vj_dirent64 { /* getdents64(2) */
	uint64_t ino;
	int64_t off;
	unsigned short reclen;
	unsigned char type;
	char name[];
};

/* One walk over the processes. */
struct scan {
	int fd; /* the directory /proc, open for good */
	long start;
	size_t at, len;
	unsigned vanished; /* ended between their name and their tag: scan_next leaves them out */
	_Alignas(8) uint8_t buf[8192];
};

int scan_open(struct scan *s); /* 0 or -errno */
void scan_begin(struct scan *s);
/* 1 with the next process but this one, 0 at the end; *tag is VJ_UNTAGGED for a process without one. */
int scan_next(struct scan *s, pid_t *pid, uint64_t *tag);
bool process_is_zombie(const struct scan *s, pid_t pid);
uint64_t process_tag(const struct scan *s, pid_t pid);
/* The number that this pid namespace gave out last (proc(5), loadavg); 0 = not known. */
int last_pid_open(void); /* a descriptor, or -1 */
pid_t last_pid(int fd);

/* ---- what a process uses (measure.c) ---- */

#define VJ_INODES_MAX 512

struct inodes {
	unsigned n;
	ino_t ino[VJ_INODES_MAX];
};

uint64_t blocks_used(void);  /* bytes, of the file system of the workspace */
void places_find(void);      /* once, after hello */
uint64_t places_used(void);  /* bytes in private file systems of memory */
uint64_t process_resident(int proc, pid_t pid, unsigned *threads); /* bytes of its own: anonymous and shared memory */
uint64_t process_share(int proc, pid_t pid);    /* the same, each page by its part; dearer */
uint64_t process_cpu_us(int proc, pid_t pid);   /* with the children that it has waited for */
uint64_t process_started_ns(int proc, pid_t pid); /* CLOCK_BOOTTIME, a hundredth of a second exact; 0 = not known */
uint64_t process_written(int proc, pid_t pid);
uint64_t process_memfds(int proc, pid_t pid, struct inodes *seen); /* bytes in memfds not seen before */
uint64_t text_field(const char *text, const char *name); /* the number behind a name such as "\nRssAnon:" */

/* ---- sampler.c ---- */

void sampler_start(const struct job *j); /* it begins */
void sampler_ended(const struct job *j);
void sampler_timers(uint64_t now);
struct job *sampler_owner(pid_t pid); /* of a process that was looked at lately; NULL = not known */

/* ---- confine.c ---- */

struct vj_rlimit {
	uint64_t soft, hard; /* as prlimit64 takes them */
};

struct vj_limit {
	int resource;
	struct vj_rlimit value;
};

struct worker_state {
	bool confined, pid1, stream;
	pid_t pid;
	char **env;            /* base environment of every command */
	const char *path;      /* its PATH */
	int scope_fd;          /* Landlock ruleset that each command enters, or -1 */
	int io_fd, oom_fd;     /* /proc/self files that a non-dumpable process cannot open */
	int null_fd;
	char oom_score[8]; /* as it was at hello */
	uint32_t oom_len;
	uint64_t lease_ns, lease_end; /* CLOCK_BOOTTIME */
	struct vj_limit cmd_limits[16];
	int ncmd_limits;
	uint64_t limit_memory, limit_pids, limit_disk;
};

extern struct worker_state worker;

/* Descriptors 0 to 3 are in use and nothing else but `channel`, which may move; 0 or -errno. */
int confine_descriptors(int *channel, int *out); /* out NULL, or the second descriptor of a stream */
/* Hardens this process in the order of the design and answers with what every wall said. */
void hello(struct lane *l, const struct request *q, struct message *m);
void lease_renew(void);
void lease_check(void);
uint64_t boot_ns(void); /* CLOCK_BOOTTIME */

/* ---- terminal.c ---- */

int terminal_open(unsigned rows, unsigned cols, int *master, int *slave, int *number); /* 0 or -errno */
int terminal_resize(const struct job *j, unsigned rows, unsigned cols);

#endif
