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
#define HALF_MS 20 /* how long the mover may be off the processor between the two events of a move */
#define ENTER_MS 5000

int (*vj_tree_enter)(int mntns_fd, int userns_fd, const uint8_t *ops, size_t len, int deadline_ms, int32_t *results,
		     size_t capacity, size_t *count) = vj_enter;

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
		err = tree_touched(t, batch, n);
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
	uint64_t started = tree_now_ns(), spent = 0;
	for (;; spent = tree_now_ns() - started) {
		int err = digest(t, force);
		wait = wait && !t->digested && !t->rescan_mode;
		if (!err && t->nlost)
			err = tree_lost_settle(t);
		bool late = spent > SETTLE_MS * 1000000u;
		tree_watch_lock();
		if (spent > HALF_MS * 1000000u)
			t->nhalf = 0; /* it was moved out of the tree: there is no second half */
		bool calm = err == 0 && !t->open && !wait && !t->nhalf;
		t->queue_lost = t->queue_lost || (late && !calm); /* the next sync walks again */
		tree_watch_unlock();
		if (err < 0 || calm)
			return err;
		if (late)
			return -EAGAIN;
		nanosleep(&pause, NULL);
		tree_watch_lock();
		tree_watch_drain();
		force = t->rescan_mode;
		tree_watch_unlock();
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
	if (t->forks != tree_watch.forks)
		return -ECHILD;
	tree_watch_lock();
	tree_watch_drain();
	bool walk = t->rescan_mode;
	tree_watch_unlock();
	int err = tree_round(t, walk);
	tree_watch_share();
	return err;
}
