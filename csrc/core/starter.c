/* starter.c — the thread that starts every jail and never ends. */
#define _GNU_SOURCE
#include "starter.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include "start.h"

#define STARTER_STACK (256 * 1024)

struct job {
	struct vj_child *child;
	pid_t pid;
	int pidfd;
	int result;
	int done;
	struct job *next;
};

static struct {
	pthread_mutex_t lock;
	pthread_cond_t work, done;
	struct job *first, **last;
	int running;
} starter = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void *starter_main(void *unused)
{
	static _Alignas(16) char stack[VJ_CHILD_STACK]; /* one child at a time: clone waits for its exec */

	prctl(PR_SET_NAME, "vj-starter", 0, 0, 0);
	pthread_mutex_lock(&starter.lock);
	for (;;) {
		while (starter.first == NULL)
			pthread_cond_wait(&starter.work, &starter.lock);
		struct job *job = starter.first;
		starter.first = job->next;
		if (starter.first == NULL)
			starter.last = &starter.first;
		pthread_mutex_unlock(&starter.lock);
		job->result = vj_child_start(job->child, stack, &job->pid, &job->pidfd);
		pthread_mutex_lock(&starter.lock);
		job->done = 1; /* from here on the job is its owner's stack again */
		pthread_cond_broadcast(&starter.done);
	}
	return unused;
}

/* In a forked child the thread does not exist and the lock may be held by nobody: begin anew. */
static void starter_after_fork(void)
{
	pthread_mutex_init(&starter.lock, NULL);
	pthread_cond_init(&starter.work, NULL);
	pthread_cond_init(&starter.done, NULL);
	starter.first = NULL;
	starter.running = 0;
}

__attribute__((constructor)) static void starter_register(void)
{
	pthread_atfork(NULL, NULL, starter_after_fork);
}

/* Called with the lock held. */
static int starter_ensure(void)
{
	pthread_attr_t attributes;
	pthread_t thread;
	sigset_t all, before;

	if (starter.running)
		return 0;
	starter.first = NULL;
	starter.last = &starter.first;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: no handler of the backend ever runs there */
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STARTER_STACK);
	int err = pthread_create(&thread, &attributes, starter_main, NULL);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	starter.running = err == 0;
	return -err;
}

int vj_starter_run(struct vj_child *child, int32_t *pid, int32_t *pidfd)
{
	struct job job = {.child = child, .pidfd = -1};

	pthread_mutex_lock(&starter.lock);
	int err = starter_ensure();
	if (err) {
		pthread_mutex_unlock(&starter.lock);
		child->stage = VJ_STAGE_THREAD;
		return err;
	}
	*starter.last = &job;
	starter.last = &job.next;
	pthread_cond_signal(&starter.work);
	while (!job.done)
		pthread_cond_wait(&starter.done, &starter.lock);
	pthread_mutex_unlock(&starter.lock);
	if (job.result == 0) {
		*pid = job.pid;
		*pidfd = job.pidfd;
	}
	return job.result;
}
