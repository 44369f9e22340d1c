/* treethread.c — the thread that repairs running jails, and the attachment of a tree to its jail. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "tree.h"

#define THREAD_PAUSE_NS 1000000 /* between two rounds: a burst of events is one repair */
#define RESCAN_EVERY_MS 1000    /* the thread's rounds where there are no events */

static struct vj_tree *with_work(bool slow)
{
	for (struct vj_tree *t = tree_watch.trees; t; t = t->next)
		if (t->attached && !t->dead && !t->visited && (t->nqueue || t->queue_lost || (slow && t->rescan_mode)))
			return t;
	return NULL;
}

/* Serve every tree once. True when there is more to do at once: events that came meanwhile, or that others drained. */
static bool one_round(bool slow)
{
	bool failed = false;
	pthread_mutex_lock(&tree_watch.lock);
	tree_watch.fresh = false;
	tree_watch_drain();
	for (struct vj_tree *t = tree_watch.trees; t; t = t->next)
		t->visited = false;
	for (struct vj_tree *t; (t = with_work(slow));) {
		bool walk = slow && t->rescan_mode;
		t->visited = true;
		t->users++;
		pthread_mutex_unlock(&tree_watch.lock);
		failed = tree_round(t, walk) < 0 || failed; /* it shows again at the next call's sync */
		pthread_mutex_lock(&tree_watch.lock);
		if (--t->users == 0)
			pthread_cond_broadcast(&tree_watch.idle);
	}
	for (struct vj_tree *t = tree_watch.trees; t; t = t->next)
		t->visited = false;
	bool more = !failed && with_work(false);
	pthread_mutex_unlock(&tree_watch.lock);
	return more;
}

static void *run(void *unused)
{
	const struct timespec pause = {0, THREAD_PAUSE_NS};
	uint64_t count;
	(void)unused;
	for (bool more = false;;) {
		pthread_mutex_lock(&tree_watch.lock);
		struct pollfd p[2] = {{.fd = tree_watch.fd, .events = POLLIN}, {.fd = tree_watch.wake, .events = POLLIN}};
		pthread_mutex_unlock(&tree_watch.lock);
		int n = poll(p, 2, more ? 0 : RESCAN_EVERY_MS);
		if (n > 0 && (p[1].revents & POLLIN) && read(p[1].fd, &count, sizeof count) < 0)
			continue;
		more = one_round(n == 0 && !more);
		nanosleep(&pause, NULL);
	}
	return NULL;
}

/* A caller that drained the queue may have taken what belongs to other trees: their thread must not sleep on. */
void tree_watch_share(void)
{
	const uint64_t one = 1;
	pthread_mutex_lock(&tree_watch.lock);
	if (tree_watch.fresh && !with_work(false))
		tree_watch.fresh = false;
	else if (tree_watch.fresh && tree_watch.thread && write(tree_watch.wake, &one, sizeof one) < 0)
		tree_watch.fresh = false; /* a full counter wakes it as well */
	pthread_mutex_unlock(&tree_watch.lock);
}

static int start_thread(void)
{
	pthread_attr_t attr;
	pthread_t thread;
	sigset_t all, before;
	if (tree_watch.thread)
		return 0;
	if (tree_watch.wake < 0)
		tree_watch.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (tree_watch.wake < 0)
		return -errno;
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 512 * 1024);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* the backend's handlers run in its own threads */
	int err = pthread_create(&thread, &attr, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	tree_watch.thread = err == 0;
	return -err;
}

int vj_tree_attach(struct vj_tree *t, int mntns_fd, int userns_fd)
{
	int mnt = fcntl(mntns_fd, F_DUPFD_CLOEXEC, 3);
	int user = userns_fd < 0 ? -1 : fcntl(userns_fd, F_DUPFD_CLOEXEC, 3);
	if (mnt < 0 || (userns_fd >= 0 && user < 0)) {
		int err = -errno;
		if (mnt >= 0)
			close(mnt);
		return err;
	}
	pthread_mutex_lock(&t->lock);
	if (t->mntns_fd >= 0)
		close(t->mntns_fd);
	if (t->userns_fd >= 0)
		close(t->userns_fd);
	t->mntns_fd = mnt;
	t->userns_fd = user;
	pthread_mutex_lock(&tree_watch.lock);
	t->attached = true;
	int err = start_thread();
	pthread_mutex_unlock(&tree_watch.lock);
	pthread_mutex_unlock(&t->lock);
	return err;
}
