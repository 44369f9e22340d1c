/* treewatch.c — one inotify(7) instance for all trees, and the thread that answers it. */
#define _GNU_SOURCE 1
#include "treewatch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <time.h>
#include <unistd.h>

#include "tree.h"

#define EVENTS (IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_ATTRIB | IN_ONLYDIR | IN_DONT_FOLLOW | IN_MASK_ADD)
#define QUEUE_MAX 16384   /* touched names that one tree keeps; above that it is walked again */
#define HALF_MOVE_TRIES 10 /* a directory that was moved out of the tree has no second half */
#define THREAD_PAUSE_NS 1000000 /* between two rounds: a burst of events is one repair */
#define RESCAN_EVERY_MS 1000    /* the thread's rounds where there are no events */

/* All trees of the process. Order of locks: a tree's own, then this one. */
static struct {
	pthread_mutex_t lock;
	pthread_cond_t idle;
	int fd, wake; /* inotify; eventfd that ends the thread's wait */
	bool thread, fresh; /* fresh: something was queued that the thread has not looked at */
	struct vj_dir **by_wd; /* hash table */
	size_t size, n;
	struct vj_tree *trees;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER, .fd = -1, .wake = -1};

static void after_fork(void)
{
	/* the child has neither the thread nor a right to the parent's events */
	pthread_mutex_init(&watch.lock, NULL);
	pthread_cond_init(&watch.idle, NULL);
	if (watch.fd >= 0)
		close(watch.fd);
	if (watch.wake >= 0)
		close(watch.wake);
	watch.fd = watch.wake = -1;
	watch.thread = false;
	watch.by_wd = NULL;
	watch.size = watch.n = 0;
	watch.trees = NULL;
}

__attribute__((constructor)) static void register_fork(void)
{
	pthread_atfork(NULL, NULL, after_fork);
}

/* ---- watch descriptors; the watch lock is held ---- */

static struct vj_dir **slot_of(int wd)
{
	return &watch.by_wd[((uint32_t)wd * 2654435761u >> 7) & (watch.size - 1)];
}

static int grow(void)
{
	size_t old = watch.size, size = old ? old * 2 : 1024;
	struct vj_dir **table = calloc(size, sizeof *table), **before = watch.by_wd;
	if (!table)
		return -ENOMEM;
	watch.by_wd = table;
	watch.size = size;
	for (size_t i = 0; i < old; i++)
		for (struct vj_dir *d = before[i], *next; d; d = next) {
			next = d->same_wd;
			d->same_wd = *slot_of(d->wd);
			*slot_of(d->wd) = d;
		}
	free(before);
	return 0;
}

/* Take a directory off its watch. Returns whether nobody else has that watch. */
static bool detach(struct vj_dir *d)
{
	bool others = false;
	for (struct vj_dir **at = slot_of(d->wd); *at;) {
		if (*at == d) {
			*at = d->same_wd;
			continue;
		}
		others = others || (*at)->wd == d->wd;
		at = &(*at)->same_wd;
	}
	watch.n--;
	d->tree->watches--;
	d->wd = -1;
	return !others;
}

void tree_need_rescan(struct vj_tree *t, const char *why)
{
	if (!t->rescan_mode)
		snprintf(t->no_watch, sizeof t->no_watch, "no live watch: %s", why);
	t->rescan_mode = true;
}

void tree_watch_add(struct vj_tree *t, struct vj_dir *d, const char *path)
{
	if (t->rescan_mode)
		return;
	pthread_mutex_lock(&watch.lock);
	if (watch.fd < 0)
		watch.fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (watch.fd < 0) {
		tree_need_rescan(t, errno == EMFILE ? "no inotify instance is left for this user" : strerror(errno));
	} else if (d->wd < 0 && t->watches >= t->max_watches) {
		tree_need_rescan(t, "more directories than watches are allowed");
	} else if (watch.n < watch.size || grow() == 0) {
		bool policy = strcmp(path, t->workspace) == 0; /* writes count only where the policy file lies */
		d->flags |= policy ? DIR_WORKSPACE : 0;
		int wd = inotify_add_watch(watch.fd, path, EVENTS | (policy ? IN_MODIFY : 0u));
		if (wd < 0 && (errno == ENOSPC || errno == ENOMEM)) {
			tree_need_rescan(t, "no inotify watch is left for this user");
		} else if (wd < 0) {
			d->flags |= DIR_UNWATCHED; /* gone again, or not readable: its parent's events tell */
		} else if (wd != d->wd) {
			int old = d->wd;
			if (old >= 0 && detach(d))
				inotify_rm_watch(watch.fd, old);
			d->wd = wd;
			d->same_wd = *slot_of(wd);
			*slot_of(wd) = d;
			d->flags &= (uint16_t)~DIR_UNWATCHED;
			watch.n++;
			t->watches++;
		}
	} else {
		tree_need_rescan(t, "out of memory");
	}
	pthread_mutex_unlock(&watch.lock);
}

void tree_watch_drop(struct vj_dir *d)
{
	if (d->wd < 0)
		return;
	pthread_mutex_lock(&watch.lock);
	int wd = d->wd;
	if (watch.size && detach(d))
		inotify_rm_watch(watch.fd, wd);
	pthread_mutex_unlock(&watch.lock);
}

/* ---- events; the watch lock is held ---- */

static bool append(struct vj_tree *t, const struct tree_touch *touch)
{
	if (t->nqueue == t->queue_cap) {
		size_t cap = t->queue_cap ? t->queue_cap * 2 : 64;
		struct tree_touch *more = cap <= QUEUE_MAX ? realloc(t->queue, cap * sizeof *more) : NULL;
		if (!more)
			return false;
		t->queue = more;
		t->queue_cap = cap;
	}
	char *copy = malloc(touch->len + 1u);
	if (!copy)
		return false;
	memcpy(copy, touch->name, touch->len);
	copy[touch->len] = 0;
	t->queue[t->nqueue] = *touch;
	t->queue[t->nqueue++].name = copy;
	return true;
}

bool tree_watch_queue(struct vj_tree *t, const struct tree_touch *again)
{
	t->queue_lost = t->queue_lost || !append(t, again);
	return !t->queue_lost;
}

static void queue(struct vj_dir *d, char *name, size_t len, uint32_t flags)
{
	struct vj_tree *t = d->tree;
	struct tree_touch *last = t->nqueue ? &t->queue[t->nqueue - 1] : NULL;
	const struct tree_touch one = {
		.dir = d, .seq = t->events++, .flags = flags, .last = flags, .len = (uint16_t)len, .name = name};
	watch.fresh = true;
	if (t->queue_lost)
		return;
	if (last && last->dir == d && last->len == len && memcmp(last->name, name, len) == 0) {
		last->flags |= flags;
		last->last = flags;
		last->seq = one.seq;
		return;
	}
	t->queue_lost = !append(t, &one);
}

/* A policy file counts only if nothing wrote to it between its arrival and its protection. */
static void policy_event(struct vj_tree *t, uint32_t mask)
{
	if (mask & (IN_DELETE | IN_MOVED_FROM)) {
		t->policy_absent = true;
	} else if (mask & (IN_CREATE | IN_MOVED_TO)) {
		/* over a protected file only the host can rename; where there was none, anybody can */
		t->policy_planted = t->policy_planted || t->policy_absent;
		t->policy_raced = t->policy_arrived;
		t->policy_arrived = true;
		t->policy_absent = false;
	} else if ((mask & IN_MODIFY) && t->policy_arrived) {
		t->policy_raced = true;
	}
}

static void one_event(struct inotify_event *e)
{
	uint32_t flags = (e->mask & (IN_CREATE | IN_MOVED_TO) ? TOUCH_CAME : 0u) |
			 (e->mask & IN_DELETE ? TOUCH_GONE : 0u) | (e->mask & IN_MOVED_FROM ? TOUCH_MOVED_AWAY : 0u);
	if (e->mask & IN_Q_OVERFLOW) {
		for (struct vj_tree *t = watch.trees; t; t = t->next)
			t->queue_lost = true;
		watch.fresh = true;
		return;
	}
	if (!watch.size)
		return;
	if ((e->mask & IN_ATTRIB) && (e->mask & IN_ISDIR))
		flags |= TOUCH_ATTRIB;
	for (struct vj_dir *d = *slot_of(e->wd), *next; d; d = next) {
		next = d->same_wd;
		if (d->wd != e->wd)
			continue;
		if ((d->flags & DIR_WORKSPACE) && e->len && strcmp(e->name, "vectora.toml") == 0)
			policy_event(d->tree, e->mask);
		if (e->mask & IN_IGNORED)
			detach(d);
		else if (flags && e->len)
			queue(d, e->name, strlen(e->name), flags);
	}
}

/* A move is two events: between them the directory is nowhere. Returns whether the queue ended there. */
static bool read_events(void)
{
	_Alignas(struct inotify_event) static char buffer[65536];
	bool half = false;
	for (;;) {
		ssize_t n = watch.fd < 0 ? -1 : read(watch.fd, buffer, sizeof buffer);
		if (n <= 0)
			return half;
		for (ssize_t at = 0; at < n;) {
			struct inotify_event *e = (struct inotify_event *)(void *)(buffer + at);
			half = (e->mask & IN_MOVED_FROM) && (e->mask & IN_ISDIR);
			one_event(e);
			at += (ssize_t)(sizeof *e + e->len);
		}
	}
}

void tree_watch_drain(void)
{
	const struct timespec pause = {0, 20000};
	for (int i = 0; read_events() && i < HALF_MOVE_TRIES; i++)
		nanosleep(&pause, NULL);
}

void tree_watch_join(struct vj_tree *t)
{
	pthread_mutex_lock(&watch.lock);
	t->next = watch.trees;
	watch.trees = t;
	pthread_mutex_unlock(&watch.lock);
}

void tree_watch_leave(struct vj_tree *t)
{
	pthread_mutex_lock(&watch.lock);
	t->dead = true;
	struct vj_tree **at = &watch.trees;
	while (*at && *at != t)
		at = &(*at)->next;
	if (*at)
		*at = t->next;
	while (t->users)
		pthread_cond_wait(&watch.idle, &watch.lock);
	pthread_mutex_unlock(&watch.lock);
}

void tree_watch_lock(void)
{
	pthread_mutex_lock(&watch.lock);
}

void tree_watch_unlock(void)
{
	pthread_mutex_unlock(&watch.lock);
}

/* ---- the thread ---- */

static struct vj_tree *with_work(bool slow)
{
	for (struct vj_tree *t = watch.trees; t; t = t->next)
		if (t->attached && !t->dead && !t->visited && (t->nqueue || t->queue_lost || (slow && t->rescan_mode)))
			return t;
	return NULL;
}

/* Serve every tree once. True when there is more to do at once: events that came meanwhile, or that others drained. */
static bool one_round(bool slow)
{
	bool failed = false;
	pthread_mutex_lock(&watch.lock);
	watch.fresh = false;
	tree_watch_drain();
	for (struct vj_tree *t = watch.trees; t; t = t->next)
		t->visited = false;
	for (struct vj_tree *t; (t = with_work(slow));) {
		bool walk = slow && t->rescan_mode;
		t->visited = true;
		t->users++;
		pthread_mutex_unlock(&watch.lock);
		failed = tree_round(t, walk) < 0 || failed; /* it shows again at the next call's sync */
		pthread_mutex_lock(&watch.lock);
		if (--t->users == 0)
			pthread_cond_broadcast(&watch.idle);
	}
	for (struct vj_tree *t = watch.trees; t; t = t->next)
		t->visited = false;
	bool more = !failed && with_work(false);
	pthread_mutex_unlock(&watch.lock);
	return more;
}

static void *run(void *unused)
{
	const struct timespec pause = {0, THREAD_PAUSE_NS};
	uint64_t count;
	(void)unused;
	for (bool more = false;;) {
		pthread_mutex_lock(&watch.lock);
		struct pollfd p[2] = {{.fd = watch.fd, .events = POLLIN}, {.fd = watch.wake, .events = POLLIN}};
		pthread_mutex_unlock(&watch.lock);
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
	pthread_mutex_lock(&watch.lock);
	if (watch.fresh && !with_work(false))
		watch.fresh = false;
	else if (watch.fresh && watch.thread && write(watch.wake, &one, sizeof one) < 0)
		watch.fresh = false; /* a full counter wakes it as well */
	pthread_mutex_unlock(&watch.lock);
}

static int start_thread(void)
{
	pthread_attr_t attr;
	pthread_t thread;
	sigset_t all, before;
	if (watch.thread)
		return 0;
	if (watch.wake < 0)
		watch.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (watch.wake < 0)
		return -errno;
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 512 * 1024);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); /* the backend's handlers run in its own threads */
	int err = pthread_create(&thread, &attr, run, NULL);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	watch.thread = err == 0;
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
	pthread_mutex_lock(&watch.lock);
	t->attached = true;
	int err = start_thread();
	pthread_mutex_unlock(&watch.lock);
	pthread_mutex_unlock(&t->lock);
	return err;
}
