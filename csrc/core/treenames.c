/* treenames.c — paths that a policy names one by one, and where symlinks lead. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tree.h"

ssize_t tree_resolve(const char *path, char *out, size_t cap, struct tree_object *o)
{
	char link[48];
	int fd = open(path, O_PATH | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t n = readlink(link, out, cap - 1);
	int err = n < 0 ? -errno : (size_t)n >= cap - 1 ? -ENAMETOOLONG : tree_stat_at(fd, "", o);
	close(fd);
	if (err)
		return err;
	out[n] = 0;
	return n;
}

static int cover_resolved(struct vj_tree *t, const char *path, enum name_kind kind, unsigned flags)
{
	char real[TREE_PATH_MAX];
	struct tree_object o;
	ssize_t n = tree_resolve(path, real, sizeof real, &o);
	if (n < 0 || real[0] != '/')
		return 0;
	bool same = strlen(path) == (size_t)n && memcmp(path, real, (size_t)n) == 0;
	if (kind == NAME_PROTECT)
		return tree_protect(t, real, (size_t)n, ITEM_PATH | (same ? 0u : ITEM_LINK), &o);
	if (!same && !tree_root_of(t, real, (size_t)n))
		return 0;
	if (!S_ISDIR(o.mode) && o.nlink > 1)
		t->alias_wanted = true;
	return tree_item_add(t, real, (size_t)n, ITEM_COVER, flags | (same ? 0u : ITEM_LINK), &o);
}

/* Watch the directory of a name that lies outside every root: the deepest that exists. */
static void anchor(struct vj_tree *t, const struct tree_name *n)
{
	char path[TREE_PATH_MAX];
	struct tree_object o;
	size_t len = n->parent_len;
	memcpy(path, n->path, len);
	for (path[len] = 0; len > 1 && (tree_stat(path, &o) != 0 || !S_ISDIR(o.mode)); path[len] = 0) {
		while (len > 1 && path[len - 1] != '/')
			len--;
		len -= len > 1;
	}
	struct vj_dir *d = tree_dir_new(t, NULL, path, len, DIR_ANCHOR);
	if (d)
		tree_watch_add(t, d, -1, path);
}

int tree_names_refresh(struct vj_tree *t)
{
	for (size_t i = 0; i < t->nnames; i++) {
		const struct tree_name *n = &t->names[i];
		int err = cover_resolved(t, n->path, n->kind, ITEM_PATH);
		if (err)
			return err;
		if (!tree_root_of(t, n->path, n->len) && n->kind == NAME_MASK)
			anchor(t, n);
	}
	return 0;
}

struct literal {
	struct vj_tree *t;
	int err;
};

static void resolve_literal(void *ctx, const char *pattern, size_t len, bool absolute)
{
	struct literal *l = ctx;
	char path[TREE_PATH_MAX];
	int n = snprintf(path, sizeof path, "%s/%.*s", absolute || l->t->workspace_len == 1 ? "" : l->t->workspace,
			 (int)len, pattern);
	if (!l->err && n > 0 && (size_t)n < sizeof path)
		l->err = cover_resolved(l->t, path, NAME_MASK, 0);
}

int tree_links_refresh(struct vj_tree *t)
{
	struct literal l = {t, 0};
	t->links_dirty = false;
	gi_each_literal(t->rules, resolve_literal, &l);
	for (size_t i = 0; i < t->links.n && !l.err;) {
		struct tree_object o;
		if (tree_stat(t->links.at[i], &o) != 0 || !S_ISLNK(o.mode)) {
			free(t->links.at[i]);
			t->links.at[i] = t->links.at[--t->links.n];
			continue;
		}
		l.err = cover_resolved(t, t->links.at[i++], NAME_MASK, 0);
	}
	return l.err;
}
