/* treewatch.c — one inotify(7) instance for all trees: which directory an event belongs to, what is queued for a tree. */
#define _GNU_SOURCE 1
#include "treewatch.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "tree.h"

#define EVENTS (IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_ATTRIB | IN_ONLYDIR | IN_MASK_ADD)
#define QUEUE_MAX 16384   /* touched names that one tree keeps; above that it is walked again */

struct tree_watch tree_watch = {
	.lock = PTHREAD_MUTEX_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER, .fd = -1, .wake = -1};

static void after_fork(void)
{
	/* the child has neither the thread nor a right to the parent's events */
	pthread_mutex_init(&tree_watch.lock, NULL);
	pthread_cond_init(&tree_watch.idle, NULL);
	if (tree_watch.fd >= 0)
		close(tree_watch.fd);
	if (tree_watch.wake >= 0)
		close(tree_watch.wake);
	tree_watch.fd = tree_watch.wake = -1;
	tree_watch.thread = false;
	tree_watch.by_wd = NULL;
	tree_watch.size = tree_watch.n = 0;
	tree_watch.trees = NULL;
	tree_watch.forks++;
}

__attribute__((constructor)) static void register_fork(void)
{
	pthread_atfork(NULL, NULL, after_fork);
}

/* ---- watch descriptors; the watch lock is held ---- */

static struct vj_dir **slot_of(int wd)
{
	return &tree_watch.by_wd[((uint32_t)wd * 2654435761u >> 7) & (tree_watch.size - 1)];
}

static int grow(void)
{
	size_t old = tree_watch.size, size = old ? old * 2 : 1024;
	struct vj_dir **table = calloc(size, sizeof *table), **before = tree_watch.by_wd;
	if (!table)
		return -ENOMEM;
	tree_watch.by_wd = table;
	tree_watch.size = size;
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
	tree_watch.n--;
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

/* `fd`: the open directory. While a jail runs its path may lead elsewhere a moment later, so it is named by its
 * descriptor; before that the path is faster. */
static int add_watch(const struct vj_tree *t, int fd, const char *path, uint32_t events)
{
	char link[48];
	if (fd < 0 || !t->scanned)
		return inotify_add_watch(tree_watch.fd, path, events | IN_DONT_FOLLOW);
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	int wd = inotify_add_watch(tree_watch.fd, link, events);
	return wd < 0 && errno == ENOENT ? inotify_add_watch(tree_watch.fd, path, events | IN_DONT_FOLLOW) : wd;
}

void tree_watch_add(struct vj_tree *t, struct vj_dir *d, int fd, const char *path)
{
	if (t->rescan_mode)
		return;
	pthread_mutex_lock(&tree_watch.lock);
	if (tree_watch.fd < 0)
		tree_watch.fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (tree_watch.fd < 0) {
		tree_need_rescan(t, errno == EMFILE ? "no inotify instance is left for this user" : strerror(errno));
	} else if (d->wd < 0 && t->watches >= t->max_watches) {
		tree_need_rescan(t, "more directories than watches are allowed");
	} else if (tree_watch.n < tree_watch.size || grow() == 0) {
		bool policy = strcmp(path, t->workspace) == 0; /* writes count only where the policy file lies */
		d->flags |= policy ? DIR_WORKSPACE : 0;
		int wd = add_watch(t, fd, path, EVENTS | (policy ? IN_MODIFY : 0u));
		if (wd < 0 && (errno == ENOSPC || errno == ENOMEM)) {
			tree_need_rescan(t, "no inotify watch is left for this user");
		} else if (wd < 0) {
			d->flags |= DIR_UNWATCHED; /* gone again, or not readable: its parent's events tell */
		} else if (wd != d->wd) {
			int old = d->wd;
			if (old >= 0 && detach(d))
				inotify_rm_watch(tree_watch.fd, old);
			d->wd = wd;
			d->same_wd = *slot_of(wd);
			*slot_of(wd) = d;
			d->flags &= (uint16_t)~DIR_UNWATCHED;
			tree_watch.n++;
			t->watches++;
		}
	} else {
		tree_need_rescan(t, "out of memory");
	}
	pthread_mutex_unlock(&tree_watch.lock);
}

void tree_watch_drop(struct vj_dir *d)
{
	if (d->wd < 0)
		return;
	pthread_mutex_lock(&tree_watch.lock);
	int wd = d->wd;
	if (tree_watch.size && detach(d))
		inotify_rm_watch(tree_watch.fd, wd);
	pthread_mutex_unlock(&tree_watch.lock);
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
	tree_watch.fresh = true;
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

/* A move is two events, and others may come between them: until the second is read, the directory is nowhere. */
static void half_move(struct vj_tree *t, uint32_t cookie)
{
	if (t->nhalf == TREE_HALF_MAX)
		t->queue_lost = true;
	else
		t->half[t->nhalf++] = cookie;
}

static void other_half(uint32_t cookie)
{
	for (struct vj_tree *t = tree_watch.trees; t; t = t->next)
		for (size_t i = 0; i < t->nhalf; i++)
			if (t->half[i] == cookie)
				t->half[i--] = t->half[--t->nhalf];
}

static void one_event(struct inotify_event *e)
{
	uint32_t flags = (e->mask & (IN_CREATE | IN_MOVED_TO) ? TOUCH_CAME : 0u) |
			 (e->mask & IN_DELETE ? TOUCH_GONE : 0u) | (e->mask & IN_MOVED_FROM ? TOUCH_MOVED_AWAY : 0u);
	if (e->mask & IN_Q_OVERFLOW) {
		for (struct vj_tree *t = tree_watch.trees; t; t = t->next)
			t->queue_lost = true;
		tree_watch.fresh = true;
		return;
	}
	if (!tree_watch.size)
		return;
	if ((e->mask & IN_ATTRIB) && (e->mask & IN_ISDIR))
		flags |= TOUCH_ATTRIB;
	if (flags && (e->mask & IN_ISDIR))
		flags |= TOUCH_DIR;
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
		if ((e->mask & IN_MOVED_FROM) && (e->mask & IN_ISDIR))
			half_move(d->tree, e->cookie);
	}
	if ((e->mask & IN_MOVED_TO) && (e->mask & IN_ISDIR))
		other_half(e->cookie);
}

void tree_watch_drain(void)
{
	_Alignas(struct inotify_event) static char buffer[65536];
	for (;;) {
		ssize_t n = tree_watch.fd < 0 ? -1 : read(tree_watch.fd, buffer, sizeof buffer);
		if (n <= 0)
			return;
		for (ssize_t at = 0; at < n;) {
			struct inotify_event *e = (struct inotify_event *)(void *)(buffer + at);
			one_event(e);
			at += (ssize_t)(sizeof *e + e->len);
		}
	}
}

void tree_watch_join(struct vj_tree *t)
{
	pthread_mutex_lock(&tree_watch.lock);
	t->forks = tree_watch.forks;
	t->next = tree_watch.trees;
	tree_watch.trees = t;
	pthread_mutex_unlock(&tree_watch.lock);
}

void tree_watch_leave(struct vj_tree *t)
{
	pthread_mutex_lock(&tree_watch.lock);
	t->dead = true;
	struct vj_tree **at = &tree_watch.trees;
	while (*at && *at != t)
		at = &(*at)->next;
	if (*at)
		*at = t->next;
	while (t->users)
		pthread_cond_wait(&tree_watch.idle, &tree_watch.lock);
	pthread_mutex_unlock(&tree_watch.lock);
}

void tree_watch_lock(void)
{
	pthread_mutex_lock(&tree_watch.lock);
}

void tree_watch_unlock(void)
{
	pthread_mutex_unlock(&tree_watch.lock);
}
