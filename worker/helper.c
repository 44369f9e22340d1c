/* helper.c — file calls. Quick ones run in the loop; those that may take long run in threads of the worker.
 *
 * A thread and not a child: signals from inside cannot reach it (it is part of pid 1), and a slow file system holds
 * up nobody else. A thread touches its task and nothing else of the worker; the loop sends what it wrote.
 */
#include "worker.h"

#include "files.h"
#include "rawsys.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#define TASKS_MAX 64 /* file calls that run or wait */
#define THREADS_MAX 4
#define STACK_SIZE (512u * 1024)
#define REPLY_SIZE (FILES_INLINE_MAX + 8192u)
#define STREAM_CONTENT (4u * 1024 * 1024) /* bytes of a file in one reply on a stream; the host asks for the rest */
#define STREAM_REPLY (STREAM_CONTENT * 2 + REPLY_SIZE)

struct task {
	struct task *next;
	struct file_request rq;
	struct lane_ref lane;
	struct slab *slab; /* holds the request's strings */
	struct mp_writer w;
	int out_fd;
	bool on_stream;
};

static struct {
	struct task tasks[TASKS_MAX];
	struct task *free; /* the loop's */
	bool ready;
	struct source wake;
	/* shared with the threads */
	pthread_mutex_t lock;
	pthread_cond_t work;
	struct task *todo, **todo_end, *done;
	int threads, idle, waiting;
} h = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .wake = {.slot = -1, .fd = -1}};

/* ---- one call ---- */

/* Where no descriptor travels, what it would carry goes into the reply: a file's next bytes, or a directory's map. */
static void put_inline(const struct file_request *rq, struct mp_writer *w, int fd)
{
	static const char fd_pair[] = "\xa2" "fd\xc3"; /* how such a reply ends */
	uint8_t *scratch = w->buf + REPLY_SIZE + STREAM_CONTENT;
	uint64_t limit = rq->op == FILE_READ && rq->limit < STREAM_CONTENT ? rq->limit : STREAM_CONTENT;
	uint64_t offset = rq->op == FILE_READ ? rq->offset : 0;
	size_t got = 0;

	while (got < limit) {
		ssize_t n = pread(fd, scratch + got, (size_t)limit - got, (off_t)(offset + got));
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			break;
		got += (size_t)n;
	}
	if (rq->op == FILE_LIST && got == STREAM_CONTENT) {
		struct file_request none = *rq;
		none.op = FILE_NONE; /* an error reply: too many names for one frame */
		w->len = 0;
		files_handle(&none, w, &fd);
	} else if (rq->op == FILE_LIST) {
		memcpy(w->buf, scratch, got);
		w->len = got;
	} else if (w->len > sizeof fd_pair && !memcmp(w->buf + w->len - 4, fd_pair, 4)) {
		w->len -= 4;
		mp_write_str(w, "content");
		mp_write_bin(w, scratch, got);
	}
}

static void run(struct task *t)
{
	files_handle(&t->rq, &t->w, &t->out_fd);
	if (t->on_stream && t->out_fd >= 0) {
		put_inline(&t->rq, &t->w, t->out_fd);
		close(t->out_fd);
		t->out_fd = -1;
	}
}

static void finish(struct task *t)
{
	struct lane *l = lane_get(t->lane);
	if (l)
		lane_send(l, &t->w, t->out_fd);
	if (t->out_fd >= 0)
		raw1(SYS_close, t->out_fd);
	if (t->rq.body_fd >= 0)
		raw1(SYS_close, t->rq.body_fd);
	if (t->on_stream && t->w.len > STREAM_CONTENT / 4)
		madvise(t->w.buf, STREAM_REPLY, MADV_DONTNEED);
	if (t->slab)
		slab_put(t->slab);
	t->slab = NULL;
	t->next = h.free;
	h.free = t;
}

/* ---- threads ---- */

static void *thread(void *arg)
{
	const uint64_t one = 1;
	(void)arg;
	pthread_mutex_lock(&h.lock);
	for (;;) {
		struct task *t = h.todo;
		if (!t) {
			h.idle++;
			pthread_cond_wait(&h.work, &h.lock);
			h.idle--;
			continue;
		}
		h.todo = t->next;
		if (!h.todo)
			h.todo_end = &h.todo;
		h.waiting--;
		pthread_mutex_unlock(&h.lock);
		run(t);
		pthread_mutex_lock(&h.lock);
		t->next = h.done;
		h.done = t;
		raw3(SYS_write, h.wake.fd, &one, sizeof one);
	}
	return NULL;
}

static int more_threads(void)
{
	pthread_attr_t attr;
	pthread_t id;
	sigset_t all, before;

	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, STACK_SIZE);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	sigfillset(&all); /* SIGCHLD belongs to the loop */
	pthread_sigmask(SIG_SETMASK, &all, &before);
	int e = pthread_create(&id, &attr, thread, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	h.threads += e == 0;
	return h.threads ? 0 : -e;
}

static int get_ready(void)
{
	if (h.ready)
		return 0;
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (fd < 0)
		return -errno;
	int e = source_add(&h.wake, SRC_HELPER, fd, POLLIN, NULL);
	if (e) {
		close(fd);
		return e;
	}
	h.todo_end = &h.todo;
	for (int i = TASKS_MAX - 1; i >= 0; i--) {
		h.tasks[i].next = h.free;
		h.free = &h.tasks[i];
	}
	h.ready = true;
	return 0;
}

static struct task *task_new(struct lane *l, const struct file_request *rq)
{
	struct task *t = h.free;
	size_t size = l->kind == LANE_PACKET ? REPLY_SIZE : STREAM_REPLY;
	if (!t)
		return NULL;
	if (!t->w.buf) {
		void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			return NULL;
		mp_writer_init(&t->w, p, size);
	}
	h.free = t->next;
	t->next = NULL;
	t->rq = *rq;
	t->lane = lane_ref(l);
	t->out_fd = -1;
	t->on_stream = l->kind != LANE_PACKET;
	t->w.len = 0;
	t->w.overflow = false;
	return t;
}

int helper_call(struct lane *l, struct message *m)
{
	struct file_request rq;
	int e;

	if (!file_request_parse(&rq, m->buf, m->len))
		return -EBADMSG;
	if (rq.op == FILE_NONE)
		return -ENOSYS;
	if ((e = get_ready()) < 0)
		return e;
	if (rq.body && !m->nfds)
		return -EBADF;
	struct task *t = task_new(l, &rq);
	if (!t)
		return -EAGAIN;
	if (rq.body) /* the last descriptor, as with every body */
		t->rq.body_fd = m->fds[--m->nfds];
	struct slab *next = files_slow(&rq) ? slab_get() : NULL;
	pthread_mutex_lock(&h.lock);
	bool queue = next && (h.idle > h.waiting || h.threads == THREADS_MAX || more_threads() == 0);
	if (queue) {
		t->slab = m->slab;
		m->slab = next;
		*h.todo_end = t;
		h.todo_end = &t->next;
		h.waiting++;
		pthread_cond_signal(&h.work);
	}
	pthread_mutex_unlock(&h.lock);
	if (queue)
		return 0;
	if (next)
		slab_put(next);
	run(t);
	finish(t);
	return 0;
}

void helper_done(void)
{
	uint64_t count;
	raw3(SYS_read, h.wake.fd, &count, sizeof count);
	pthread_mutex_lock(&h.lock);
	struct task *t = h.done;
	h.done = NULL;
	pthread_mutex_unlock(&h.lock);
	while (t) {
		struct task *next = t->next;
		finish(t);
		t = next;
	}
}
