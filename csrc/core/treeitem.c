/* treeitem.c — the table of what is covered, read-only or pinned: by path and by inode. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "kernel.h"
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
	if (t->scanned && what == ITEM_COVER && !(flags & ITEM_INNER) && t->appeared.n < 1000)
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
		if (t->sent[i].item == item)
			t->sent[i].item = NULL;
	free(item);
}

void tree_items_below(struct vj_tree *t, const char *path, size_t len, bool remember)
{
	for (size_t i = 0; i < t->items_size; i++)
		for (struct vj_item *it = t->by_path[i], *next; it; it = next) {
			next = it->same_path;
			if (it->len > len && memcmp(it->path, path, len) == 0 && (it->path[len] == '/' || len == 1))
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
