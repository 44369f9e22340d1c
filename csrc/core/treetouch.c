/* treetouch.c — a batch of names that events touched: what they showed is forgotten, what they show now is looked at. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tree.h"

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

/* Was a directory that came touched again while it was looked at? Then what was looked at need not be what came. */
static void check_looks(struct vj_tree *t, const struct tree_touch *batch, size_t n)
{
	tree_watch_lock();
	tree_watch_drain();
	for (size_t i = 0; i < t->nqueue && !t->open; i++) {
		const struct tree_touch *seen = bsearch(&t->queue[i], batch, n, sizeof *batch, by_name);
		t->open += seen && (seen->last & TOUCH_CAME) && (seen->last & TOUCH_DIR);
	}
	tree_watch_unlock();
}

int tree_touched(struct vj_tree *t, struct tree_touch *batch, size_t n)
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
			struct tree_touch *one = &batch[kept - 1], *later = batch[i].seq > one->seq ? &batch[i] : one;
			one->flags |= batch[i].flags;
			one->last = later->last;
			one->seq = later->seq;
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
		if (batch[i].flags & ~(uint32_t)(TOUCH_ATTRIB | TOUCH_DIR))
			forget(t, &batch[i], &gone);
	}
	forget_below(t, &gone);
	for (size_t i = 0; i < kept && !err; i++)
		err = look_again(t, &batch[i]);
	check_looks(t, batch, kept);
	for (size_t i = 0; i < kept; i++)
		free(batch[i].name);
	return err;
}
