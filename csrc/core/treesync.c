/* treesync.c — what events mean for the table, and the repair of the jail. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "start.h"
#include "tree.h"

#define APPLY_TRIES 40    /* host and agent may replace or move a name as fast as we look at it */
#define SETTLE_MS 250
#define ENTER_MS 5000

int (*vj_tree_enter)(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms, int32_t *results,
		     size_t capacity, size_t *count) = vj_enter;

/* ---- a batch of touched names; the tree's lock is held ---- */

static int by_name(const void *a, const void *b)
{
	const struct tree_touch *x = a, *y = b;
	if (x->dir != y->dir)
		return (uintptr_t)x->dir < (uintptr_t)y->dir ? -1 : 1;
	return x->len != y->len ? (x->len < y->len ? -1 : 1) : memcmp(x->name, y->name, x->len);
}

/* Directories whose names do not show any more what they showed, sorted by path. */
struct gone {
	struct gone_dir {
		char *path;
		bool moved;
	} *at;
	size_t n;
};

static int by_path(const void *a, const void *b)
{
	return strcmp(((const struct gone_dir *)a)->path, ((const struct gone_dir *)b)->path);
}

/* The name does not show any more what it showed: forget its mount, and note a directory for the pass over what was in
 * it. */
static void forget(struct vj_tree *t, const struct tree_touch *touch, struct gone *gone)
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
	if (child || (item && (item->flags & ITEM_IS_DIR))) {
		char *copy = strdup(path);
		if (copy)
			gone->at[gone->n++] = (struct gone_dir){copy, moved};
		else
			tree_items_below(t, path, len, moved);
	}
	if (item)
		tree_item_drop(t, item, moved);
	if (child)
		tree_dir_free(t, child);
}

/* One pass over the items for all directories that are gone: a removed tree has thousands of them. */
static void forget_below(struct vj_tree *t, struct gone *gone)
{
	char path[TREE_PATH_MAX];
	qsort(gone->at, gone->n, sizeof *gone->at, by_path);
	for (size_t i = 0; gone->n && i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i], *next; it; it = next) {
			const struct gone_dir *above = NULL;
			next = it->same_path;
			memcpy(path, it->path, it->len + 1u);
			for (size_t len = it->len; len > 1 && !above;) {
				while (len > 1 && path[len - 1] != '/')
					len--;
				path[len > 1 ? --len : 1] = 0;
				const struct gone_dir key = {path, false};
				above = bsearch(&key, gone->at, gone->n, sizeof *gone->at, by_path);
			}
			if (above)
				tree_item_drop(t, it, above->moved);
		}
	for (size_t i = 0; i < gone->n; i++)
		free(gone->at[i].path);
	free(gone->at);
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

/* Is the touched name a part of a path that the policy names? Most of what happens in a home directory is not. */
static bool leads_to_name(const struct vj_tree *t, const struct vj_dir *d, const struct tree_touch *touch)
{
	size_t at = d->len == 1 ? 1 : d->len + 1u;
	for (size_t i = 0; i < t->nnames; i++) {
		const struct tree_name *n = &t->names[i];
		if (n->len >= at + touch->len && memcmp(n->path, d->name, d->len) == 0 &&
		    memcmp(n->path + at, touch->name, touch->len) == 0 &&
		    (n->path[at + touch->len] == '/' || n->path[at + touch->len] == 0))
			return true;
	}
	return false;
}

/* It came and is not there: the event that it went has to come, or where it went stays unknown. Ask again then. */
static void keep_open(struct vj_tree *t, const struct tree_touch *touch)
{
	tree_watch_lock();
	if (tree_watch_queue(t, touch))
		t->open++;
	tree_watch_unlock();
}

static int look_again(struct vj_tree *t, const struct tree_touch *touch)
{
	struct vj_dir *d = touch->dir;
	if (d->flags & DIR_DEAD)
		return 0; /* it was walked anew under its new name */
	if ((d->flags & DIR_GIT) && !git_noise(d, touch->name, touch->len))
		t->gits_dirty = true;
	if ((d->flags & DIR_ANCHOR) && leads_to_name(t, d, touch))
		t->names_dirty = true;
	bool absent = false;
	int err = tree_look_at(t, d, touch->name, touch->len, &absent);
	if (!err && absent && (touch->last & TOUCH_CAME))
		keep_open(t, touch);
	return err;
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
	struct gone gone = {calloc(n, sizeof *gone.at), 0};
	size_t kept = 0;
	int err = 0;
	if (!gone.at) {
		for (size_t i = 0; i < n; i++)
			free(batch[i].name);
		return -ENOMEM;
	}
	qsort(batch, n, sizeof *batch, by_name);
	for (size_t i = 0; i < n; i++) {
		if (kept && by_name(&batch[kept - 1], &batch[i]) == 0) {
			struct tree_touch *one = &batch[kept - 1];
			one->flags |= batch[i].flags;
			one->last = batch[i].seq > one->seq ? batch[i].last : one->last;
			one->seq = batch[i].seq > one->seq ? batch[i].seq : one->seq;
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
			forget(t, &batch[i], &gone);
	}
	forget_below(t, &gone);
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
	for (size_t i = 0; i < t->dirs_size; i++)
		for (struct vj_dir *d = t->dirs[i]; d; d = d->same_name)
			d->ino = 0; /* what has a name now is what counts */
	t->pending = true;
	return tree_scan_all(t);
}

/* Everything that is queued. `force`: walk although no event was lost (there are no events). */
static int digest(struct vj_tree *t, bool force)
{
	tree_watch_lock();
	struct tree_touch *batch = t->queue;
	size_t n = t->nqueue;
	bool lost = t->queue_lost || force;
	t->queue = NULL;
	t->nqueue = t->queue_cap = 0;
	t->queue_lost = false;
	tree_watch_unlock();
	t->digested = n + lost;
	t->open = 0;
	int err = 0;
	if (lost) {
		for (size_t i = 0; i < n; i++)
			free(batch[i].name);
		err = walk_again(t);
	} else if (n) {
		t->live = true;
		err = handle(t, batch, n);
		t->live = false;
		if (!err)
			err = refresh(t);
	} else if (t->gits_dirty) {
		err = tree_git_refresh(t);
	}
	free(batch);
	if (err && err != -E2BIG) {
		tree_watch_lock();
		t->queue_lost = true; /* what was not finished is done by the next walk */
		tree_watch_unlock();
	}
	tree_watch_lock();
	if (!t->nqueue)
		tree_dirs_bury(t);
	tree_watch_unlock();
	return err;
}

/* Digest until no directory is on the move. `wait`: something moved, so that an event has to come. An agent that never
 * stops moving makes its own calls fail. */
static int settle(struct vj_tree *t, bool force, bool wait)
{
	const struct timespec pause = {0, 20000};
	uint64_t deadline = tree_now_ns() + SETTLE_MS * 1000000u;
	for (;;) {
		int err = digest(t, force);
		wait = wait && !t->digested && !t->rescan_mode;
		if (!err && t->nlost)
			err = tree_lost_settle(t);
		if (err < 0 || (err == 0 && !t->open && !wait))
			return err;
		bool late = tree_now_ns() > deadline;
		nanosleep(&pause, NULL);
		tree_watch_lock();
		tree_watch_drain();
		force = t->rescan_mode;
		t->queue_lost = t->queue_lost || late; /* the next sync walks again */
		tree_watch_unlock();
		if (late)
			return -EAGAIN;
	}
}

/* Objects that were others than we thought: read them again. */
static int correct(struct vj_tree *t)
{
	for (size_t i = 0; i < t->nsent; i++) {
		struct vj_item *it = t->sent[i].item;
		struct tree_object o;
		if (!it || (it->flags & ITEM_APPLIED))
			continue;
		int err = tree_stat(it->path, &o);
		if (err || S_ISLNK(o.mode)) {
			tree_lost_at(t, it->path);
			tree_item_drop(t, it, true);
		} else {
			if (o.ino != it->object.ino) { /* replaced, or its directory is on the move */
				if (it->what == ITEM_COVER)
					tree_known_add(t, &it->object);
				tree_lost_at(t, it->path);
			}
			err = tree_item_add(t, it->path, it->len, it->what, it->flags, &o);
			if (err)
				return err;
		}
	}
	return 0;
}

/* Send what is not applied. Without events (rescan mode) only a second answer of the same kind is believed. */
static int apply_once(struct vj_tree *t, int tries, size_t *sent, size_t *retry)
{
	uint8_t *ops;
	size_t len, count = 0;
	*retry = 0;
	tree_watch_lock();
	uint64_t before = t->events;
	tree_watch_unlock();
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
		tree_watch_lock();
		tree_watch_drain();
		bool calm = t->events == before && !t->rescan_mode;
		tree_watch_unlock();
		if (!err)
			err = tree_ops_answer(t, results, count, calm || (t->rescan_mode && tries > 0), retry);
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
		int err = apply_once(t, i, &sent, &retry);
		if (!sent)
			return err ? err : changed;
		changed = 1;
		if (err && !retry)
			return err;
		if (!err)
			return 1;
		err = correct(t);
		tree_watch_lock();
		tree_watch_drain();
		tree_watch_unlock();
		if (!err)
			err = settle(t, false, true);
		if (err)
			return err;
	}
	return t->attached ? -EAGAIN : 0;
}

int tree_round(struct vj_tree *t, bool force)
{
	pthread_mutex_lock(&t->lock);
	int err = t->scanned ? settle(t, force, false) : 0;
	if (!err)
		err = apply(t);
	if (err >= 0 && t->attached)
		tree_policy_settle(t);
	pthread_mutex_unlock(&t->lock);
	return err;
}

int vj_tree_sync(struct vj_tree *t)
{
	tree_watch_lock();
	tree_watch_drain();
	bool walk = t->rescan_mode;
	tree_watch_unlock();
	int err = tree_round(t, walk);
	tree_watch_share();
	return err;
}
