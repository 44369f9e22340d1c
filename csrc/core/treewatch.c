/* treewatch.c — one inotify(7) instance for all trees, and the repair of what its events opened. */
#define _GNU_SOURCE 1
#include "treewatch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "start.h"
#include "tree.h"

#define EVENTS (IN_CREATE | IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_ATTRIB | IN_ONLYDIR | IN_DONT_FOLLOW)
#define QUEUE_MAX 16384   /* touched names that one tree keeps; above that it is walked again */
#define APPLY_TRIES 12    /* the host may replace a name as fast as we look at it */
#define ENTER_MS 5000
#define THREAD_PAUSE_NS 1000000 /* between two rounds: a burst of events is one repair */
#define RESCAN_EVERY_MS 1000    /* the thread's rounds where there are no events */

int (*vj_tree_enter)(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms, int32_t *results,
		     size_t capacity, size_t *count) = vj_enter;

/* All trees of the process. Order of locks: a tree's own, then this one. */
static struct {
	pthread_mutex_t lock;
	pthread_cond_t idle;
	int fd;
	bool thread;
	struct vj_dir **by_wd; /* hash table */
	size_t size, n;
	struct vj_tree *trees;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER, .fd = -1};

static void after_fork(void)
{
	/* the child has neither the thread nor a right to the parent's events */
	pthread_mutex_init(&watch.lock, NULL);
	pthread_cond_init(&watch.idle, NULL);
	if (watch.fd >= 0)
		close(watch.fd);
	watch.fd = -1;
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
		int wd = inotify_add_watch(watch.fd, path, EVENTS);
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

static void queue(struct vj_dir *d, const char *name, size_t len, uint32_t flags)
{
	struct vj_tree *t = d->tree;
	struct tree_touch *last = t->nqueue ? &t->queue[t->nqueue - 1] : NULL;
	if (t->queue_lost)
		return;
	if (last && last->dir == d && last->len == len && memcmp(last->name, name, len) == 0) {
		last->flags |= flags;
		return;
	}
	if (t->nqueue == t->queue_cap) {
		size_t cap = t->queue_cap ? t->queue_cap * 2 : 64;
		struct tree_touch *more = cap <= QUEUE_MAX ? realloc(t->queue, cap * sizeof *more) : NULL;
		if (!more) {
			t->queue_lost = true;
			return;
		}
		t->queue = more;
		t->queue_cap = cap;
	}
	char *copy = malloc(len + 1);
	if (!copy) {
		t->queue_lost = true;
		return;
	}
	memcpy(copy, name, len);
	copy[len] = 0;
	t->queue[t->nqueue++] = (struct tree_touch){.dir = d, .flags = flags, .len = (uint16_t)len, .name = copy};
}

static void one_event(const struct inotify_event *e)
{
	uint32_t flags = (e->mask & (IN_CREATE | IN_MOVED_TO) ? TOUCH_CAME : 0u) |
			 (e->mask & IN_DELETE ? TOUCH_GONE : 0u) | (e->mask & IN_MOVED_FROM ? TOUCH_MOVED_AWAY : 0u);
	if (e->mask & IN_Q_OVERFLOW) {
		for (struct vj_tree *t = watch.trees; t; t = t->next)
			t->queue_lost = true;
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
		if (e->mask & IN_IGNORED)
			detach(d);
		else if (flags && e->len)
			queue(d, e->name, strlen(e->name), flags);
	}
}

static void drain(void)
{
	_Alignas(struct inotify_event) static char buffer[65536];
	for (;;) {
		ssize_t n = watch.fd < 0 ? -1 : read(watch.fd, buffer, sizeof buffer);
		if (n <= 0)
			return;
		for (ssize_t at = 0; at < n;) {
			const struct inotify_event *e = (const struct inotify_event *)(const void *)(buffer + at);
			one_event(e);
			at += (ssize_t)(sizeof *e + e->len);
		}
	}
}

/* ---- what a batch of touched names means; the tree's lock is held ---- */

static int by_name(const void *a, const void *b)
{
	const struct tree_touch *x = a, *y = b;
	if (x->dir != y->dir)
		return (uintptr_t)x->dir < (uintptr_t)y->dir ? -1 : 1;
	return x->len != y->len ? (x->len < y->len ? -1 : 1) : memcmp(x->name, y->name, x->len);
}

/* The name does not show any more what it showed: forget its mounts, and what was below. */
static void forget(struct vj_tree *t, const struct tree_touch *touch)
{
	char path[TREE_PATH_MAX];
	struct vj_dir *child = tree_dir_find(t, touch->dir, touch->name, touch->len);
	ssize_t n = tree_dir_path(touch->dir, path, sizeof path);
	bool moved = (touch->flags & TOUCH_MOVED_AWAY) != 0;
	if (n < 0 || (size_t)n + touch->len + 2 > sizeof path)
		return;
	if (n > 1)
		path[n++] = '/';
	memcpy(path + n, touch->name, touch->len + 1u);
	size_t len = (size_t)n + touch->len;
	struct vj_item *item = tree_item_at(t, path, len);
	if (item && (item->flags & ITEM_LINK))
		t->links_dirty = t->names_dirty = true;
	if (child || (item && (item->flags & ITEM_IS_DIR)))
		tree_items_below(t, path, len, moved, false);
	if (item)
		tree_item_drop(t, item, moved);
	if (child)
		tree_dir_free(t, child);
}

static bool git_noise(const struct vj_dir *d, const char *name, size_t len)
{
	static const char *const quiet[] = {"index", "COMMIT_EDITMSG", "ORIG_HEAD", "FETCH_HEAD", "logs", "refs"};
	if (len > 5 && memcmp(name + len - 5, ".lock", 5) == 0)
		return true;
	for (size_t i = 0; i < sizeof quiet / sizeof *quiet; i++)
		if (strcmp(name, quiet[i]) == 0)
			return true;
	return d->len == 7 && memcmp(d->name, "objects", 7) == 0 && strcmp(name, "info") != 0;
}

static int look_again(struct vj_tree *t, const struct tree_touch *touch)
{
	struct vj_dir *d = touch->dir;
	if (d->flags & DIR_DEAD)
		return 0; /* it was walked anew under its new name */
	if ((d->flags & DIR_GIT) && !git_noise(d, touch->name, touch->len))
		t->gits_dirty = true;
	if (d->flags & DIR_ANCHOR)
		t->names_dirty = true;
	return tree_look(t, d, touch->name, touch->len);
}

/* Which repositories the next audit looks at: that of this directory, or all when it belongs to none by its path (the
 * git directory that a pointer file names). */
static void audit_again(struct vj_tree *t, const struct vj_dir *d)
{
	char path[TREE_PATH_MAX];
	bool one = false;
	ssize_t n = tree_dir_path(d, path, sizeof path);
	for (size_t i = 0; n > 0 && i < t->ngits; i++)
		if (strncmp(t->gits[i].path, path, strlen(t->gits[i].path)) == 0) {
			t->gits[i].audited = false;
			one = true;
		}
	for (size_t i = 0; !one && i < t->ngits; i++)
		t->gits[i].audited = false;
}

static int handle(struct vj_tree *t, struct tree_touch *batch, size_t n)
{
	size_t kept = 0;
	int err = 0;
	qsort(batch, n, sizeof *batch, by_name);
	for (size_t i = 0; i < n; i++) {
		if (kept && by_name(&batch[kept - 1], &batch[i]) == 0) {
			batch[kept - 1].flags |= batch[i].flags;
			free(batch[i].name);
		} else {
			batch[kept++] = batch[i];
		}
	}
	for (size_t i = 0; i < kept; i++) {
		if (batch[i].dir->flags & DIR_DEAD)
			continue;
		if (batch[i].dir->flags & DIR_GIT)
			audit_again(t, batch[i].dir);
		if (batch[i].flags & ~(uint32_t)TOUCH_ATTRIB)
			forget(t, &batch[i]);
	}
	for (size_t i = 0; i < kept; i++) {
		if (!err)
			err = look_again(t, &batch[i]);
		free(batch[i].name);
	}
	return err;
}

static int refresh(struct vj_tree *t)
{
	int err = tree_links_refresh(t);
	if (!err && t->names_dirty) {
		t->names_dirty = false;
		err = tree_names_refresh(t);
	}
	if (!err && t->gits_dirty)
		err = tree_git_refresh(t);
	if (!err && t->alias_wanted)
		err = tree_alias_pass(t);
	return err;
}

static int walk_again(struct vj_tree *t)
{
	t->rescans++;
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i]; it; it = it->same_path)
			it->flags &= (uint16_t)~ITEM_APPLIED;
	t->pending = true;
	return tree_scan_all(t);
}

/* Everything that is queued. `force`: walk although no event was lost (there are no events). */
static int digest(struct vj_tree *t, bool force)
{
	pthread_mutex_lock(&watch.lock);
	struct tree_touch *batch = t->queue;
	size_t n = t->nqueue;
	bool lost = t->queue_lost || force;
	t->queue = NULL;
	t->nqueue = t->queue_cap = 0;
	t->queue_lost = false;
	pthread_mutex_unlock(&watch.lock);
	int err = 0;
	if (lost) {
		for (size_t i = 0; i < n; i++)
			free(batch[i].name);
		err = walk_again(t);
	} else if (n) {
		err = handle(t, batch, n);
		if (!err)
			err = refresh(t);
	}
	free(batch);
	if (err && err != -E2BIG) {
		pthread_mutex_lock(&watch.lock);
		t->queue_lost = true; /* what was not finished is done by the next walk */
		pthread_mutex_unlock(&watch.lock);
	}
	pthread_mutex_lock(&watch.lock);
	if (!t->nqueue)
		tree_dirs_bury(t);
	pthread_mutex_unlock(&watch.lock);
	return err;
}

/* Objects that were others than we thought: read them again. */
static int correct(struct vj_tree *t)
{
	for (size_t i = 0; i < t->nsent; i++) {
		struct vj_item *it = t->sent[i];
		struct tree_object o;
		if (!it || (it->flags & ITEM_APPLIED))
			continue;
		int err = tree_stat(it->path, &o);
		if (err || S_ISLNK(o.mode)) {
			t->sent[i] = NULL;
			tree_item_drop(t, it, true);
		} else {
			err = tree_item_add(t, it->path, it->len, it->what, it->flags, &o);
			if (err)
				return err;
		}
	}
	return 0;
}

static int apply_once(struct vj_tree *t, size_t *sent, size_t *retry)
{
	uint8_t *ops;
	size_t len, count = 0;
	*retry = 0;
	int err = tree_ops_encode(t, false, &ops, &len);
	if (err)
		return err;
	*sent = t->nsent;
	if (!t->nsent)
		t->pending = false;
	if (t->nsent) {
		int32_t *results = calloc(t->nsent, sizeof *results);
		err = results ? vj_tree_enter(t->mntns_fd, t->userns_fd, ops, len, ENTER_MS, results, t->nsent, &count)
			      : -ENOMEM;
		if (!err)
			err = tree_ops_answer(t, results, count, retry);
		free(results);
	}
	free(ops);
	return err;
}

static int apply(struct vj_tree *t)
{
	int changed = 0;
	for (int i = 0; t->attached && i < APPLY_TRIES; i++) {
		if (!t->pending)
			return changed;
		size_t sent = 0, retry = 0;
		int err = apply_once(t, &sent, &retry);
		if (!sent)
			return err ? err : changed;
		changed = 1;
		if (err && !retry)
			return err;
		if (!err)
			return 1;
		err = correct(t);
		pthread_mutex_lock(&watch.lock);
		drain();
		pthread_mutex_unlock(&watch.lock);
		if (!err)
			err = digest(t, false);
		if (err)
			return err;
	}
	return t->attached ? -EAGAIN : 0;
}

static int round_of(struct vj_tree *t, bool force)
{
	pthread_mutex_lock(&t->lock);
	int err = t->scanned ? digest(t, force) : 0;
	if (!err)
		err = apply(t);
	pthread_mutex_unlock(&t->lock);
	return err;
}

int vj_tree_sync(struct vj_tree *t)
{
	pthread_mutex_lock(&watch.lock);
	drain();
	bool walk = t->rescan_mode;
	pthread_mutex_unlock(&watch.lock);
	return round_of(t, walk);
}

/* ---- the thread ---- */

static struct vj_tree *with_work(bool slow)
{
	for (struct vj_tree *t = watch.trees; t; t = t->next)
		if (t->attached && !t->dead && !t->visited && (t->nqueue || t->queue_lost || (slow && t->rescan_mode)))
			return t;
	return NULL;
}

static void one_round(bool slow)
{
	pthread_mutex_lock(&watch.lock);
	drain();
	for (struct vj_tree *t = watch.trees; t; t = t->next)
		t->visited = false;
	for (struct vj_tree *t; (t = with_work(slow));) {
		bool walk = slow && t->rescan_mode;
		t->visited = true;
		t->users++;
		pthread_mutex_unlock(&watch.lock);
		round_of(t, walk); /* a failure shows again at the next call's sync */
		pthread_mutex_lock(&watch.lock);
		if (--t->users == 0)
			pthread_cond_broadcast(&watch.idle);
	}
	pthread_mutex_unlock(&watch.lock);
}

static void *run(void *unused)
{
	const struct timespec pause = {0, THREAD_PAUSE_NS};
	(void)unused;
	for (;;) {
		pthread_mutex_lock(&watch.lock);
		struct pollfd p = {.fd = watch.fd, .events = POLLIN};
		pthread_mutex_unlock(&watch.lock);
		int n = poll(&p, 1, RESCAN_EVERY_MS);
		one_round(n == 0);
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static int start_thread(void)
{
	pthread_attr_t attr;
	pthread_t thread;
	sigset_t all, before;
	if (watch.thread)
		return 0;
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
