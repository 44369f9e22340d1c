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

/* A pin is a second mount over the directory: a process that stands in it already keeps the first one, and covers made
 * later do not show to it. So pins are made before the first command, and again only where the host has replaced what
 * was pinned. */
int tree_pin(struct vj_tree *t, const char *path, size_t len, const struct tree_object *o)
{
	const struct vj_item *it = tree_item_at(t, path, len);
	if (!t->scanned)
		tree_list_add(&t->pinned, path, len);
	else if (!tree_list_has(&t->pinned, path, len))
		return 0;
	return tree_item_add(t, path, len, ITEM_PIN, it ? it->flags : 0u, o);
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
		int err = tree_pin(t, parent, len, &o);
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

static int by_place(const struct vj_item *x, const struct vj_item *y)
{
	unsigned dx = depth_of(x), dy = depth_of(y);
	return dx != dy ? (dx < dy ? -1 : 1) : strcmp(x->path, y->path);
}

static int by_order(const void *a, const void *b)
{
	const struct vj_item *x = ((const struct tree_sent *)a)->item, *y = ((const struct tree_sent *)b)->item;
	return x->what != y->what ? (x->what < y->what ? -1 : 1) : by_place(x, y);
}

/* The late directory that an inner item lies in; NULL when a cover above that one hides both. */
static struct vj_item *deep_above(struct vj_tree *t, const struct vj_item *it)
{
	struct vj_item *found = NULL;
	for (size_t len = it->len; len > 1;) {
		while (len > 1 && it->path[len - 1] != '/')
			len--;
		struct vj_item *up = len > 1 ? tree_item_at(t, it->path, --len) : NULL;
		if (up && up->what == ITEM_COVER && !(up->flags & ITEM_INNER))
			found = up;
	}
	return found && (found->flags & ITEM_DEEP) ? found : NULL;
}

static bool wants_op(struct vj_tree *t, const struct vj_item *it, bool all)
{
	return (all || !(it->flags & ITEM_APPLIED)) && !(it->flags & ITEM_INNER) &&
	       what_is_above(t, it->path, it->len) < ITEM_COVER;
}

struct inner {
	struct vj_item *deep, *item;
};

static int by_deep(const void *a, const void *b)
{
	const struct inner *x = a, *y = b;
	return x->deep != y->deep ? strcmp(x->deep->path, y->deep->path) : strcmp(x->item->path, y->item->path);
}

/* Inner covers lie below the cover of their directory: it is lifted, they are made, it is put back, in one go. */
static int collect_inner(struct vj_tree *t)
{
	size_t n = 0;
	struct inner *found = calloc(t->nitems + 1, sizeof *found);
	if (!found)
		return -ENOMEM;
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i]; it; it = it->same_path)
			if ((it->flags & ITEM_INNER) && !(it->flags & ITEM_APPLIED) && (found[n].deep = deep_above(t, it)))
				found[n++].item = it;
	qsort(found, n, sizeof *found, by_deep);
	for (size_t i = 0; i < n; i++) {
		struct vj_item *deep = found[i].deep;
		if (i == 0 || found[i - 1].deep != deep)
			t->sent[t->nsent++] = (struct tree_sent){deep, true};
		t->sent[t->nsent++] = (struct tree_sent){found[i].item, false};
		if (i + 1 == n || found[i + 1].deep != deep)
			t->sent[t->nsent++] = (struct tree_sent){deep, false};
		deep->flags &= (uint16_t)~ITEM_APPLIED;
	}
	free(found);
	return 0;
}

static void write_op(struct mp_writer *w, const struct tree_sent *s)
{
	const struct vj_item *it = s->item;
	static const char *const names[] = {"pin", "ro", "cover_at"};
	mp_write_array(w, s->uncover || it->what == ITEM_PIN ? 2 : it->what == ITEM_RO ? 3 : 4);
	mp_write_str(w, s->uncover ? "uncover" : names[it->what]);
	mp_write_bin(w, it->path, it->len);
	if (!s->uncover && it->what == ITEM_RO)
		mp_write_bool(w, true);
	if (!s->uncover && it->what == ITEM_COVER) {
		mp_write_uint(w, it->object.dev);
		mp_write_uint(w, it->object.ino);
	}
}

int tree_ops_encode(struct vj_tree *t, bool all, uint8_t **buf, size_t *len)
{
	struct mp_writer w;
	size_t size = 16;
	*buf = NULL;
	free(t->sent);
	t->nsent = 0;
	t->sent = calloc(2 * t->nitems + 1, sizeof *t->sent); /* a late directory twice, never more than it has items */
	if (!t->sent)
		return -ENOMEM;
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i]; it; it = it->same_path)
			if (wants_op(t, it, all))
				t->sent[t->nsent++] = (struct tree_sent){it, false};
	qsort(t->sent, t->nsent, sizeof *t->sent, by_order);
	if (!all && collect_inner(t))
		return -ENOMEM;
	for (size_t i = 0; i < t->nsent; i++)
		size += t->sent[i].item->len + 48;
	*buf = malloc(size);
	if (!*buf) {
		t->nsent = 0;
		return -ENOMEM;
	}
	mp_writer_init(&w, *buf, size);
	mp_write_array(&w, (uint32_t)t->nsent);
	for (size_t i = 0; i < t->nsent; i++)
		write_op(&w, &t->sent[i]);
	*len = w.len;
	return w.overflow ? -E2BIG : 0;
}

/* ENOENT and ENOTDIR when calm, and the host has the name: the jail does not have it (or it lies below a cover), so it
 * shows nothing. Else, like ESTALE and ELOOP: it moved under the launcher's hands; *retry counts them, look again. */
int tree_ops_answer(struct vj_tree *t, const int32_t *results, size_t count, bool calm, size_t *retry)
{
	struct tree_object o;
	int worst = 0;
	*retry = 0;
	t->pending = false;
	for (size_t i = 0; i < t->nsent; i++) {
		struct vj_item *it = t->sent[i].item;
		int32_t r = i < count ? results[i] : EIO;
		if (!it || t->sent[i].uncover) /* what was not covered need not be lifted */
			continue;
		bool absent = calm && (r == ENOENT || r == ENOTDIR) && tree_stat(it->path, &o) == 0 && o.ino == it->object.ino;
		bool moved = !absent && (r == ESTALE || r == ELOOP || r == ENOENT || r == ENOTDIR);
		if (r == 0 || absent) {
			it->flags |= ITEM_APPLIED;
			continue;
		}
		t->pending = true;
		*retry += moved;
		if (!worst || !moved)
			worst = -r;
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

