/* treedir.c — the directories of a tree: found by parent and name, freed with everything below. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tree.h"

static uint32_t key(const struct vj_dir *parent, const char *name, size_t len)
{
	return tree_hash(name, len, (uint32_t)((uintptr_t)parent >> 4) * 2654435761u);
}

static int grow(struct vj_tree *t)
{
	size_t size = t->dirs_size ? t->dirs_size * 2 : 256;
	struct vj_dir **table = calloc(size, sizeof *table);
	if (!table)
		return -ENOMEM;
	for (size_t i = 0; i < t->dirs_size; i++)
		for (struct vj_dir *d = t->dirs[i], *next; d; d = next) {
			next = d->same_name;
			d->same_name = table[d->hash & (size - 1)];
			table[d->hash & (size - 1)] = d;
		}
	free(t->dirs);
	t->dirs = table;
	t->dirs_size = size;
	return 0;
}

struct vj_dir *tree_dir_find(struct vj_tree *t, struct vj_dir *parent, const char *name, size_t len)
{
	if (!t->dirs_size)
		return NULL;
	uint32_t hash = key(parent, name, len);
	struct vj_dir *d = t->dirs[hash & (t->dirs_size - 1)];
	while (d && (d->hash != hash || d->parent != parent || d->len != len || memcmp(d->name, name, len) != 0))
		d = d->same_name;
	return d;
}

struct vj_dir *tree_dir_new(struct vj_tree *t, struct vj_dir *parent, const char *name, size_t len, unsigned flags)
{
	struct vj_dir *d = tree_dir_find(t, parent, name, len);
	if (d) {
		d->flags |= (uint16_t)flags;
		return d;
	}
	if (len >= TREE_PATH_MAX || (t->ndirs >= t->dirs_size && grow(t)))
		return NULL;
	d = calloc(1, sizeof *d + len + 1);
	if (!d)
		return NULL;
	memcpy(d->name, name, len);
	d->len = (uint16_t)len;
	d->hash = key(parent, name, len);
	d->tree = t;
	d->wd = -1;
	d->flags = (uint16_t)flags;
	d->parent = parent;
	struct vj_dir **head = parent ? &parent->child : &t->tops;
	d->next = *head;
	if (*head)
		(*head)->prev = d;
	*head = d;
	struct vj_dir **slot = &t->dirs[d->hash & (t->dirs_size - 1)];
	d->same_name = *slot;
	*slot = d;
	t->ndirs++;
	return d;
}

static void free_one(struct vj_tree *t, struct vj_dir *d)
{
	struct vj_dir **at = &t->dirs[d->hash & (t->dirs_size - 1)];
	while (*at && *at != d)
		at = &(*at)->same_name;
	if (*at)
		*at = d->same_name;
	if (d->prev)
		d->prev->next = d->next;
	else if (d->parent)
		d->parent->child = d->next;
	else
		t->tops = d->next;
	if (d->next)
		d->next->prev = d->prev;
	tree_watch_drop(d);
	t->ndirs--;
	d->flags |= DIR_DEAD;
	d->parent = d->child = d->prev = NULL;
	d->next = t->graveyard; /* events that were queued for it still point here */
	t->graveyard = d;
}

bool tree_dir_in_place(const struct vj_dir *d)
{
	char path[TREE_PATH_MAX];
	struct tree_object o;
	return tree_dir_path(d, path, sizeof path) > 0 && tree_stat(path, &o) == 0 && S_ISDIR(o.mode) &&
	       (!d->ino || (o.ino == d->ino && o.dev == d->dev));
}

void tree_lost(struct vj_tree *t, struct vj_dir *d)
{
	if (!d->parent)
		return; /* a grant is bound where it was, whatever its name shows now */
	for (size_t i = 0; i < t->nlost; i++)
		if (t->lost[i] == d)
			return;
	if (t->nlost == t->lost_cap) {
		size_t cap = t->lost_cap ? t->lost_cap * 2 : 16;
		struct vj_dir **more = realloc(t->lost, cap * sizeof *more);
		if (!more)
			return; /* the parent's event is still to come */
		t->lost = more;
		t->lost_cap = cap;
	}
	t->lost[t->nlost++] = d;
}

void tree_lost_at(struct vj_tree *t, const char *path)
{
	struct vj_dir *d = NULL, *next;
	for (struct vj_dir *top = t->tops; top; top = top->next)
		if (strncmp(path, top->name, top->len) == 0 && (path[top->len] == '/' || top->len == 1) &&
		    (!d || top->len > d->len))
			d = top;
	for (size_t at = d ? (d->len == 1 ? 1u : d->len + 1u) : 0; d; at += strcspn(path + at, "/") + 1) {
		next = tree_dir_find(t, d, path + at, strcspn(path + at, "/"));
		if (!next || !path[at + strcspn(path + at, "/")])
			break;
		d = next;
	}
	if (d)
		tree_lost(t, d);
}

int tree_lost_settle(struct vj_tree *t)
{
	struct vj_dir **before = t->lost;
	size_t n = t->nlost;
	int err = 0;
	t->lost = NULL;
	t->nlost = t->lost_cap = 0;
	for (size_t i = 0; i < n && !err; i++) {
		struct vj_dir *d = before[i];
		if (d->flags & DIR_DEAD)
			continue;
		if (tree_dir_in_place(d))
			err = tree_walk_below(t, d);
		else
			tree_lost(t, d);
	}
	free(before);
	return err ? err : (int)t->nlost;
}

void tree_dirs_bury(struct vj_tree *t)
{
	if (t->nlost)
		return;
	for (struct vj_dir *d = t->graveyard, *next; d; d = next) {
		next = d->next;
		free(d);
	}
	t->graveyard = NULL;
}

void tree_dir_free(struct vj_tree *t, struct vj_dir *d)
{
	struct vj_dir *stop = d->parent;
	while (d != stop) { /* from the leaves up, without recursion */
		while (d->child)
			d = d->child;
		struct vj_dir *up = d->parent;
		bool was_last = up == stop;
		free_one(t, d);
		if (was_last)
			return;
		d = up;
	}
}

/* Is a slash to be written between the path of `d` and a name in it? Not after the root, "/". */
static size_t joint(const struct vj_dir *d)
{
	return d && !(d->len == 1 && d->name[0] == '/') ? 1 : 0;
}

ssize_t tree_dir_path(const struct vj_dir *d, char *out, size_t cap)
{
	size_t len = 0;
	for (const struct vj_dir *at = d; at; at = at->parent)
		len += at->len + joint(at->parent);
	if (len >= cap)
		return -ENAMETOOLONG;
	out[len] = 0;
	size_t end = len;
	for (const struct vj_dir *at = d; at; at = at->parent) {
		end -= at->len;
		memcpy(out + end, at->name, at->len);
		if (joint(at->parent))
			out[--end] = '/';
	}
	return (ssize_t)len;
}
