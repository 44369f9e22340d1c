/* treeops.c — protections with their pins, and the ops that make the state of the table true in a jail. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "msg.h"
#include "tree.h"

/* ---- protections ---- */

const struct tree_root *tree_root_of(const struct vj_tree *t, const char *path, size_t len)
{
	const struct tree_root *best = NULL;
	for (size_t i = 0; i < t->nroots; i++) {
		const struct tree_root *r = &t->roots[i];
		bool in = len >= r->len && memcmp(path, r->path, r->len) == 0 &&
			  (len == r->len || path[r->len] == '/' || r->len == 1);
		if (in && (!best || r->len > best->len))
			best = r;
	}
	return best;
}

/* The strongest item above a path, up to its root: what lies below a cover does not show, below a read-only bind
 * nothing can be changed. */
static int what_is_above(struct vj_tree *t, const char *path, size_t len)
{
	int best = -1;
	while (len > 1) {
		while (len > 1 && path[len - 1] != '/')
			len--;
		if (len <= 1)
			break;
		const struct vj_item *it = tree_item_at(t, path, --len);
		if (it && it->what > best)
			best = it->what;
	}
	return best;
}

int tree_pin_parents(struct vj_tree *t, const char *path, size_t len)
{
	const struct tree_root *root = tree_root_of(t, path, len);
	char parent[TREE_PATH_MAX];
	struct tree_object o;
	if (!root || !root->writable || len >= sizeof parent)
		return 0;
	memcpy(parent, path, len);
	for (;;) {
		while (len > root->len && parent[len - 1] != '/')
			len--;
		if (len <= root->len + 1)
			return 0;
		parent[--len] = 0;
		const struct vj_item *it = tree_item_at(t, parent, len);
		if (it && it->what != ITEM_PIN)
			return 0; /* inside something read-only or covered nothing can be renamed */
		if (tree_stat(parent, &o) != 0 || !S_ISDIR(o.mode))
			return 0; /* a race; the event that tells of it comes */
		int err = tree_item_add(t, parent, len, ITEM_PIN, it ? it->flags : 0, &o);
		if (err)
			return err;
	}
}

int tree_protect(struct vj_tree *t, const char *path, size_t len, unsigned flags, const struct tree_object *o)
{
	const struct tree_root *root = tree_root_of(t, path, len);
	if (!root || !root->writable || S_ISLNK(o->mode) || what_is_above(t, path, len) >= ITEM_RO)
		return 0;
	int err = tree_item_add(t, path, len, ITEM_RO, flags, o);
	if (!err && !S_ISDIR(o->mode) && o->nlink > 1)
		t->alias_wanted = true;
	return err ? err : tree_pin_parents(t, path, len);
}

/* ---- ops ---- */

static unsigned depth_of(const struct vj_item *it)
{
	unsigned n = 0;
	for (uint32_t i = 0; i < it->len; i++)
		n += it->path[i] == '/';
	return n;
}

static int by_order(const void *a, const void *b)
{
	const struct vj_item *x = *(struct vj_item *const *)a, *y = *(struct vj_item *const *)b;
	if (x->what != y->what)
		return x->what < y->what ? -1 : 1;
	unsigned dx = depth_of(x), dy = depth_of(y);
	return dx != dy ? (dx < dy ? -1 : 1) : strcmp(x->path, y->path);
}

int tree_ops_encode(struct vj_tree *t, bool all, uint8_t **buf, size_t *len)
{
	size_t size = 16;
	free(t->sent);
	t->nsent = 0;
	t->sent = malloc((t->nitems + 1) * sizeof(struct vj_item *));
	if (!t->sent)
		return -ENOMEM;
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i]; it; it = it->same_path)
			if ((all || !(it->flags & ITEM_APPLIED)) && what_is_above(t, it->path, it->len) < ITEM_COVER) {
				t->sent[t->nsent++] = it;
				size += it->len + 48;
			}
	qsort(t->sent, t->nsent, sizeof(struct vj_item *), by_order);
	struct mp_writer w;
	*buf = malloc(size);
	if (!*buf) {
		t->nsent = 0;
		return -ENOMEM;
	}
	mp_writer_init(&w, *buf, size);
	mp_write_array(&w, (uint32_t)t->nsent);
	for (size_t i = 0; i < t->nsent; i++) {
		const struct vj_item *it = t->sent[i];
		mp_write_array(&w, it->what == ITEM_PIN ? 2 : it->what == ITEM_RO ? 3 : 4);
		mp_write_str(&w, it->what == ITEM_PIN ? "pin" : it->what == ITEM_RO ? "ro" : "cover_at");
		mp_write_bin(&w, it->path, it->len);
		if (it->what == ITEM_RO)
			mp_write_bool(&w, true);
		if (it->what == ITEM_COVER) {
			mp_write_uint(&w, it->object.dev);
			mp_write_uint(&w, it->object.ino);
		}
	}
	*len = w.len;
	return w.overflow ? -E2BIG : 0;
}

/* ENOENT and ENOTDIR: the jail does not have that name (or it lies below a cover), so it shows nothing. ESTALE and
 * ELOOP: another object was there; *retry counts them, the caller looks again. */
int tree_ops_answer(struct vj_tree *t, const int32_t *results, size_t count, size_t *retry)
{
	int worst = 0;
	*retry = 0;
	t->pending = false;
	for (size_t i = 0; i < t->nsent; i++) {
		struct vj_item *it = t->sent[i];
		int32_t r = i < count ? results[i] : EIO;
		if (!it)
			continue;
		if (r == 0 || r == ENOENT || r == ENOTDIR) {
			it->flags |= ITEM_APPLIED;
		} else if (r == ESTALE || r == ELOOP) {
			(*retry)++;
			worst = worst ? worst : -r;
			t->pending = true;
		} else {
			worst = -r;
			t->pending = true;
		}
	}
	return worst;
}

/* ---- lists of paths ---- */

bool tree_list_has(const struct tree_list *l, const char *text, size_t len)
{
	for (size_t i = 0; i < l->n; i++)
		if (strlen(l->at[i]) == len && memcmp(l->at[i], text, len) == 0)
			return true;
	return false;
}

int tree_list_add(struct tree_list *l, const char *text, size_t len)
{
	if (tree_list_has(l, text, len))
		return 0;
	if (l->n == l->cap) {
		size_t cap = l->cap ? l->cap * 2 : 8;
		char **more = realloc(l->at, cap * sizeof *more);
		if (!more)
			return -ENOMEM;
		l->at = more;
		l->cap = cap;
	}
	char *copy = malloc(len + 1);
	if (!copy)
		return -ENOMEM;
	memcpy(copy, text, len);
	copy[len] = 0;
	l->at[l->n++] = copy;
	return 0;
}

void tree_list_free(struct tree_list *l)
{
	for (size_t i = 0; i < l->n; i++)
		free(l->at[i]);
	free(l->at);
	memset(l, 0, sizeof *l);
}

