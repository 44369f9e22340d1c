/* treeroots.c — the whole tree: each grant, then the names, links, repositories and hard links that the walk left open. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "tree.h"

/* Does a rule match the granted path itself, or a directory above it? A grant below a masked directory shows nothing. */
static bool root_masked(const struct vj_tree *t, const struct tree_root *r, bool dir)
{
	size_t ws = t->workspace_len;
	bool inside = r->len > ws && memcmp(r->path, t->workspace, ws) == 0 && (r->path[ws] == '/' || ws == 1);
	bool above = ws >= r->len && memcmp(t->workspace, r->path, r->len) == 0 &&
		     (ws == r->len || t->workspace[r->len] == '/' || r->len == 1);
	size_t from = inside ? (ws == 1 ? 1 : ws + 1) : 1;
	if (above)
		return false; /* rules are relative to the workspace: they say nothing about it or what holds it */
	for (size_t name = from, end; name < r->len; name = end + 1) {
		for (end = name; end < r->len && r->path[end] != '/';)
			end++;
		struct gi_path p = {r->path, end, inside ? from : name, name};
		bool last = end == r->len;
		unsigned flags = (last && !dir ? 0u : GI_DIR) | (inside ? 0u : GI_OUTSIDE);
		if (!last && !inside)
			flags |= GI_FLOOR;
		if (gi_match(t->rules, &p, flags) == GI_MATCH)
			return true;
	}
	return false;
}

/* A granted git directory (the common one of a worktree): a branch named like a secret is no secret. By its name too:
 * what lies in it a command can make in any other place. */
static bool is_git_directory(const struct vj_tree *t, const char *path)
{
	size_t n = strlen(path);
	if (n < 4 || (strcmp(path + n - 4, ".git") && !strstr(path, "/.git/")) || !strcmp(path, t->workspace))
		return false;
	static const char *const parts[] = {"HEAD", "objects", "refs"};
	char part[TREE_PATH_MAX];
	struct tree_object o;
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		if (tree_join(part, sizeof part, path, parts[i]) < 0 || tree_stat(part, &o) != 0)
			return false;
	return true;
}

static int scan_root(struct vj_tree *t, const struct tree_root *r)
{
	struct tree_object o;
	int err = tree_stat(r->path, &o);
	if (err) {
		if (err != -ENOENT)
			tree_incomplete(t, strerror(-err));
		return 0;
	}
	bool dir = S_ISDIR(o.mode);
	if (root_masked(t, r, dir))
		return tree_item_add(t, r->path, r->len, ITEM_COVER, 0, &o);
	if (!dir)
		return 0;
	unsigned flags = DIR_ROOT | (r->writable ? DIR_WRITABLE : 0u) | (is_git_directory(t, r->path) ? DIR_DOTGIT : 0u);
	struct vj_dir *d = tree_dir_new(t, NULL, r->path, r->len, flags);
	return d ? tree_walk_below(t, d) : -ENOMEM;
}

static void free_unlisted(struct vj_tree *t, struct vj_dir *d)
{
	while (d) { /* preorder over a tree that loses nodes on the way */
		struct vj_dir *next;
		if (!(d->flags & (DIR_LISTED | DIR_GIT | DIR_ANCHOR))) {
			next = d->next;
			struct vj_dir *up = d->parent;
			tree_dir_free(t, d);
			d = next ? next : up;
			if (next || !up)
				continue;
		} else if (d->child) {
			d = d->child;
			continue;
		}
		while (d && !d->next)
			d = d->parent;
		d = d ? d->next : NULL;
	}
}

int tree_scan_all(struct vj_tree *t)
{
	uint64_t started = tree_now_ns();
	struct tree_object o;
	char policy[TREE_PATH_MAX];
	int err = 0;
	t->complete = true;
	t->reason[0] = 0;
	t->entries = t->ndirs_seen = 0;
	tree_items_unsee(t);
	for (size_t i = 0; i < t->dirs_size; i++)
		for (struct vj_dir *d = t->dirs[i]; d; d = d->same_name)
			d->flags &= (uint16_t)~DIR_LISTED;
	for (size_t i = 0; i < t->nroots && !err; i++)
		if (t->roots[i].top)
			err = scan_root(t, &t->roots[i]);
	if (!err)
		err = tree_names_refresh(t);
	if (!err)
		err = tree_links_refresh(t);
	if (!err)
		err = tree_git_refresh(t);
	if (!err && t->alias_wanted)
		err = tree_alias_pass(t);
	if (!err && t->complete) {
		tree_items_sweep(t);
		free_unlisted(t, t->tops);
	}
	if (!t->scanned) {
		snprintf(policy, sizeof policy, "%s/vectora.toml", t->workspace_len == 1 ? "" : t->workspace);
		/* nothing protects the name of a link: who puts a file there may be the agent */
		bool absent = tree_stat(policy, &o) != 0 || S_ISLNK(o.mode);
		tree_watch_lock();
		t->policy_absent = absent;
		tree_watch_unlock();
		if (!err)
			err = tree_audit_baseline(t);
	}
	t->scanned = true;
	t->ms = (double)(tree_now_ns() - started) / 1e6;
	if (err == -E2BIG)
		tree_incomplete(t, "more than 50,000 covers");
	return err;
}
