/* treeitem.c — the table of what is covered, read-only or pinned, and the ops that make it so. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "kernel.h"
#include "msg.h"
#include "tree.h"

#define STATX_WANTED 0xfffu /* STATX_BASIC_STATS | STATX_BTIME */
#define STATX_BTIME_SET 0x800u
#define KNOWN_MAX 65536 /* objects whose name got lost that are still looked for */

uint32_t tree_hash(const void *p, size_t len, uint32_t seed)
{
	const uint8_t *b = p;
	uint32_t h = seed ^ 2166136261u; /* FNV-1a */
	for (size_t i = 0; i < len; i++)
		h = (h ^ b[i]) * 16777619u;
	return h ^ (h >> 15);
}

static uint32_t ino_hash(uint64_t ino)
{
	return (uint32_t)((ino * 0x9e3779b97f4a7c15ull) >> 32);
}

static int64_t time_of(const struct vj_statx *x, int i)
{
	return (int64_t)x->times[2 * i] * 1000000000 + (int64_t)(x->times[2 * i + 1] & 0xffffffffu);
}

int tree_stat_at(int dir, const char *name, struct tree_object *o)
{
	struct vj_statx x;
	memset(&x, 0, sizeof x);
	memset(o, 0, sizeof *o);
	int flags = AT_SYMLINK_NOFOLLOW | (name[0] ? 0 : VJ_AT_EMPTY_PATH);
	if (syscall(VJ_SYS_statx, dir, name, flags, STATX_WANTED, &x) != 0)
		return -errno;
	o->dev = makedev(x.dev_major, x.dev_minor);
	o->ino = x.ino;
	o->btime = x.mask & STATX_BTIME_SET ? time_of(&x, 1) : 0;
	o->ctime = time_of(&x, 2);
	o->mtime = time_of(&x, 3);
	o->mode = x.mode;
	o->nlink = x.nlink;
	o->uid = x.uid;
	return 0;
}

int tree_stat(const char *path, struct tree_object *o)
{
	return tree_stat_at(AT_FDCWD, path, o);
}

static bool same_object(const struct tree_object *a, const struct tree_object *b)
{
	return a->dev == b->dev && a->ino == b->ino && a->btime == b->btime;
}

/* ---- the table, by path and by inode ---- */

static int table_grow(struct vj_tree *t)
{
	size_t size = t->items_size ? t->items_size * 2 : 256;
	struct vj_item **by_path = calloc(size, sizeof *by_path), **by_object = calloc(size, sizeof *by_object);
	if (!by_path || !by_object) {
		free(by_path);
		free(by_object);
		return -ENOMEM;
	}
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i], *next; it; it = next) {
			next = it->same_path;
			it->same_path = by_path[it->hash & (size - 1)];
			by_path[it->hash & (size - 1)] = it;
			struct vj_item **slot = &by_object[ino_hash(it->object.ino) & (size - 1)];
			it->same_object = *slot;
			*slot = it;
		}
	free(t->by_path);
	free(t->by_object);
	t->by_path = by_path;
	t->by_object = by_object;
	t->items_size = size;
	return 0;
}

static void unlink_object(struct vj_tree *t, struct vj_item *item)
{
	struct vj_item **at = &t->by_object[ino_hash(item->object.ino) & (t->items_size - 1)];
	while (*at && *at != item)
		at = &(*at)->same_object;
	if (*at)
		*at = item->same_object;
}

static void link_object(struct vj_tree *t, struct vj_item *item)
{
	struct vj_item **at = &t->by_object[ino_hash(item->object.ino) & (t->items_size - 1)];
	item->same_object = *at;
	*at = item;
}

struct vj_item *tree_item_at(struct vj_tree *t, const char *path, size_t len)
{
	if (!t->items_size)
		return NULL;
	uint32_t hash = tree_hash(path, len, 0);
	struct vj_item *it = t->by_path[hash & (t->items_size - 1)];
	while (it && (it->hash != hash || it->len != len || memcmp(it->path, path, len) != 0))
		it = it->same_path;
	return it;
}

struct vj_item *tree_item_of(struct vj_tree *t, uint64_t ino)
{
	struct vj_item *it = t->items_size ? t->by_object[ino_hash(ino) & (t->items_size - 1)] : NULL;
	while (it && it->object.ino != ino)
		it = it->same_object;
	return it;
}

int tree_item_add(struct vj_tree *t, const char *path, size_t len, enum item_what what, unsigned flags,
		  const struct tree_object *o)
{
	struct vj_item *it = tree_item_at(t, path, len);
	flags = (flags & ~(unsigned)(ITEM_APPLIED | ITEM_SENT)) | (S_ISDIR(o->mode) ? ITEM_IS_DIR : 0u);
	if (it) {
		bool same = same_object(&it->object, o) && it->what >= what && o->btime != 0;
		unlink_object(t, it);
		t->ncovers += what == ITEM_COVER && it->what != ITEM_COVER;
		it->what = it->what > what ? it->what : (uint8_t)what;
		it->flags = (uint16_t)(flags | ITEM_SEEN | (same ? it->flags & ITEM_APPLIED : 0));
		it->object = *o;
		link_object(t, it);
		t->pending = t->pending || !(it->flags & ITEM_APPLIED);
		return 0;
	}
	if (what == ITEM_COVER && t->ncovers >= VJ_TREE_COVERS_MAX)
		return -E2BIG;
	if (t->nitems >= t->items_size) {
		int err = table_grow(t);
		if (err)
			return err;
	}
	it = malloc(sizeof *it + len + 1);
	if (!it)
		return -ENOMEM;
	memset(it, 0, sizeof *it);
	memcpy(it->path, path, len);
	it->path[len] = 0;
	it->len = (uint32_t)len;
	it->hash = tree_hash(path, len, 0);
	it->what = (uint8_t)what;
	it->flags = (uint16_t)(flags | ITEM_SEEN);
	it->object = *o;
	struct vj_item **at = &t->by_path[it->hash & (t->items_size - 1)];
	it->same_path = *at;
	*at = it;
	link_object(t, it);
	t->nitems++;
	t->ncovers += what == ITEM_COVER;
	t->pending = true;
	if (t->scanned && what == ITEM_COVER && t->appeared.n < 1000)
		tree_list_add(&t->appeared, path, len);
	return 0;
}

void tree_item_drop(struct vj_tree *t, struct vj_item *item, bool remember)
{
	struct vj_item **at = &t->by_path[item->hash & (t->items_size - 1)];
	while (*at && *at != item)
		at = &(*at)->same_path;
	if (*at)
		*at = item->same_path;
	unlink_object(t, item);
	t->nitems--;
	t->ncovers -= item->what == ITEM_COVER;
	if (remember && item->what == ITEM_COVER)
		tree_known_add(t, &item->object);
	for (size_t i = 0; i < t->nsent; i++)
		if (t->sent[i] == item)
			t->sent[i] = NULL;
	free(item);
}

static bool below(const struct vj_item *it, const char *path, size_t len, bool with_itself)
{
	return it->len >= len && memcmp(it->path, path, len) == 0 &&
	       ((it->len > len && (it->path[len] == '/' || len == 1)) || (with_itself && it->len == len));
}

void tree_items_below(struct vj_tree *t, const char *path, size_t len, bool remember, bool with_itself)
{
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i], *next; it; it = next) {
			next = it->same_path;
			if (below(it, path, len, with_itself))
				tree_item_drop(t, it, remember);
		}
}

void tree_items_unsee(struct vj_tree *t)
{
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i]; it; it = it->same_path)
			it->flags &= (uint16_t)~ITEM_SEEN;
}

void tree_items_sweep(struct vj_tree *t)
{
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i], *next; it; it = next) {
			next = it->same_path;
			if (!(it->flags & ITEM_SEEN))
				tree_item_drop(t, it, true);
		}
}

/* ---- objects whose name got lost ---- */

int tree_known_add(struct vj_tree *t, const struct tree_object *o)
{
	for (size_t i = 0; i < t->nknown; i++)
		if (same_object(&t->known[i], o))
			return 0;
	if (t->nknown >= KNOWN_MAX)
		return -E2BIG;
	if (t->nknown == t->known_cap) {
		size_t cap = t->known_cap ? t->known_cap * 2 : 64;
		struct tree_object *more = realloc(t->known, cap * sizeof *more);
		if (!more)
			return -ENOMEM;
		t->known = more;
		t->known_cap = cap;
	}
	t->known[t->nknown++] = *o;
	return 0;
}

bool tree_known_take(struct vj_tree *t, const struct tree_object *o)
{
	for (size_t i = 0; i < t->nknown; i++)
		if (same_object(&t->known[i], o)) {
			t->known[i] = t->known[--t->nknown];
			return true;
		}
	return false;
}

bool tree_knows_inode(const struct vj_tree *t, uint64_t ino)
{
	for (size_t i = 0; i < t->nknown; i++)
		if (t->known[i].ino == ino)
			return true;
	return false;
}

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

void tree_items_free(struct vj_tree *t)
{
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i], *next; it; it = next) {
			next = it->same_path;
			free(it);
		}
	free(t->by_path);
	free(t->by_object);
	free(t->known);
	free(t->sent);
}
