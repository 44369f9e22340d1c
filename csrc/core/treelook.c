/* treelook.c — the decision about one name: covered, protected, a repository, or a directory to walk. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "tree.h"

#define HOST_RUNS_MAX 1000 /* hazards of this kind that are kept */

int tree_look_read(struct tree_look *l)
{
	if (l->o.mode)
		return 0;
	return l->fd >= 0 ? tree_stat_at(l->fd, l->path + l->name, &l->o) : tree_stat(l->path, &l->o);
}

static unsigned rule_flags(const struct tree_look *l)
{
	bool inside = l->len > l->t->workspace_len && memcmp(l->path, l->t->workspace, l->t->workspace_len) == 0 &&
		      (l->path[l->t->workspace_len] == '/' || l->t->workspace_len == 1);
	return (l->dir->flags & DIR_FOLD ? GI_FOLD : 0u) | (l->dir->flags & DIR_DOTGIT ? GI_DOTGIT : 0u) |
	       (inside ? 0u : GI_OUTSIDE);
}

static const struct tree_name *named(const struct tree_look *l, enum name_kind kind, const char *name, size_t name_len)
{
	for (size_t i = 0; i < l->t->nnames; i++) {
		const struct tree_name *n = &l->t->names[i];
		size_t at = n->parent_len == 1 ? 1 : n->parent_len + 1;
		if (n->kind == kind && at == l->name && n->len == at + name_len &&
		    memcmp(n->path, l->path, l->name) == 0 && memcmp(n->path + at, name, name_len) == 0)
			return n;
	}
	return NULL;
}

/* The first walk looks into git directories too: what is there before the first command is not known by its cover. */
static bool in_git(const struct tree_look *l)
{
	return (l->dir->flags & DIR_DOTGIT) && !l->t->scanned;
}

static enum gi_verdict verdict(const struct tree_look *l, const char *path, size_t len, unsigned more)
{
	struct gi_path p = {path, len, l->rel, l->name};
	return gi_match(l->t->rules, &p, (rule_flags(l) & ~(in_git(l) ? GI_DOTGIT : 0u)) | more);
}

/* Is this git's own file although its name is that of a secret: a branch, its log? Judged by what is in it, because a
 * command can rename the directory that holds a secret to `.git`, or into one. */
static bool git_own(const struct tree_look *l)
{
	static const char *const names[] = {"HEAD", "config", "description", "hooks", "info", "objects", "refs", "logs",
					    "index", "packed-refs", "modules", "worktrees", "branches", "heads", "tags",
					    "remotes", "pack", "lfs"};
	const char *name = l->path + l->name;
	const struct gi_path p = {l->path, l->len, l->rel, l->name};
	char text[128];
	if (gi_match(l->t->rules, &p, rule_flags(l) | (l->type == TYPE_DIR ? GI_DIR : 0u)) == GI_MATCH)
		return false; /* by a rule that names .git itself */
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (strcmp(name, names[i]) == 0)
			return true;
	if (!strstr(l->path, "/refs/") && !strstr(l->path, "/logs/"))
		return false;
	if (l->type == TYPE_DIR)
		return name[0] != '.'; /* no part of a ref begins with a dot, git-check-ref-format(1) */
	ssize_t n = tree_read_small(l->path, text, sizeof text);
	return n > 40 && (strncmp(text, "ref: ", 5) == 0 || strspn(text, "0123456789abcdef") >= 40);
}

struct leaving {
	const struct tree_look *l;
	unsigned flags;
};

static bool original_is_masked(void *ctx, const char *name, size_t len)
{
	const struct leaving *v = ctx;
	const struct tree_look *l = v->l;
	char path[TREE_PATH_MAX + 512];
	struct tree_object o;
	if (l->name + len >= sizeof path)
		return false;
	memcpy(path, l->path, l->name);
	memcpy(path + l->name, name, len);
	path[l->name + len] = 0;
	if (verdict(l, path, l->name + len, v->flags) != GI_MATCH && !named(l, NAME_MASK, name, len))
		return false;
	/* a directory of that name is not a file that an editor saves */
	return tree_stat(path, &o) != 0 || !S_ISDIR(o.mode);
}

/* Is this a directory that commands could enter before it is covered? A cover that follows its object is none. */
static bool covered_late(const struct tree_look *l, unsigned flags)
{
	const struct vj_item *it = tree_item_at(l->t, l->path, l->len);
	if (!l->t->scanned || (flags & (ITEM_HISTORY | ITEM_ALIAS)))
		return false;
	return !it || it->what != ITEM_COVER || it->object.ino != l->o.ino || (it->flags & ITEM_DEEP);
}

static int cover(struct tree_look *l, unsigned flags)
{
	int err = tree_look_read(l);
	if (err)
		return err == -ENOENT ? 0 : err;
	if (S_ISLNK(l->o.mode))
		return 0;
	bool dir = S_ISDIR(l->o.mode);
	if (!dir && l->o.nlink > 1)
		l->t->alias_wanted = true;
	if (dir && covered_late(l, flags))
		flags |= ITEM_DEEP;
	err = tree_item_add(l->t, l->path, l->len, ITEM_COVER, flags, &l->o);
	return err ? err : flags & ITEM_DEEP ? 2 : 0;
}

/* Is this an object that is covered or protected under another name? 1: yes, an item was made. */
int tree_look_other_name(struct tree_look *l)
{
	struct vj_tree *t = l->t;
	struct vj_item *it = tree_item_of(t, l->ino);
	bool lost = t->nknown && tree_knows_inode(t, l->ino);
	if ((!it && !lost) || tree_look_read(l) != 0)
		return 0;
	for (; it; it = it->same_object) {
		bool same = it->object.ino == l->o.ino && it->object.dev == l->o.dev && it->object.btime == l->o.btime;
		if (!same || (it->len == l->len && memcmp(it->path, l->path, l->len) == 0))
			continue;
		bool link = !S_ISDIR(l->o.mode) && l->o.nlink > 1;
		if (it->what == ITEM_COVER) {
			int err = cover(l, link ? ITEM_ALIAS : ITEM_HISTORY);
			return err < 0 ? err : 1;
		}
		if (it->what == ITEM_RO && link) {
			int err = tree_protect(t, l->path, l->len, ITEM_ALIAS, &l->o);
			return err ? err : 1;
		}
	}
	if (lost && tree_known_take(t, &l->o)) {
		int err = cover(l, ITEM_HISTORY);
		return err < 0 ? err : 1;
	}
	return 0;
}

static int protect_name(struct tree_look *l)
{
	struct vj_tree *t = l->t;
	if (tree_look_read(l) != 0)
		return 0;
	return tree_protect(t, l->path, l->len, ITEM_PATH, &l->o);
}

/* Names that editors, shells and package managers of the host read and run by themselves. */
static void look_for_hazard(struct tree_look *l)
{
	static const char *const names[] = {".envrc",	     "conftest.py",	 "sitecustomize.py", "usercustomize.py",
					    ".npmrc",	     ".yarnrc",		 ".yarnrc.yml",	     ".pnpmfile.cjs",
					    "lefthook.yml",  "mise.toml",	 ".mise.toml",	     ".pre-commit-config.yaml",
					    ".gitattributes", ".gitmodules",	 "direnv.toml",	     ".lldbinit",
					    ".gdbinit",	     ".vimrc",		 ".exrc",	     ".nvimrc",
					    ".bazelrc",	     "devcontainer.json", ".dir-locals.el"};
	static const char *const places[] = {"/.vscode/", "/.idea/", "/.husky/", "/.devcontainer/", "/.github/workflows/"};
	const char *name = l->path + l->name;
	size_t len = l->len - l->name;
	bool runs = len > 4 && strcmp(name + len - 4, ".pth") == 0;
	for (size_t i = 0; i < sizeof names / sizeof *names && !runs; i++)
		runs = strcmp(name, names[i]) == 0;
	for (size_t i = 0; i < sizeof places / sizeof *places && !runs; i++)
		runs = strstr(l->path, places[i]) != NULL;
	if (runs && l->t->host_runs.n < HOST_RUNS_MAX)
		tree_list_add(&l->t->host_runs, l->path, l->len);
}

/* HEAD, objects and refs together are a repository to git, also without a `.git`: git runs what its config names. */
static void look_for_bare(struct tree_look *l)
{
	static const char *const parts[] = {"HEAD", "objects", "refs"};
	const char *name = l->path + l->name;
	char dir[TREE_PATH_MAX], part[TREE_PATH_MAX];
	struct tree_object o;
	if ((l->dir->flags & DIR_DOTGIT) || l->name < 2 || l->t->host_runs.n >= HOST_RUNS_MAX ||
	    (strcmp(name, "HEAD") && strcmp(name, "objects") && strcmp(name, "refs")))
		return;
	memcpy(dir, l->path, l->name - 1);
	dir[l->name - 1] = 0;
	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
		if (tree_join(part, sizeof part, dir, parts[i]) < 0 || tree_stat(part, &o) != 0)
			return;
	tree_list_add(&l->t->host_runs, dir, l->name - 1);
}

int tree_look_decide(struct tree_look *l)
{
	struct vj_tree *t = l->t;
	const char *name = l->path + l->name;
	size_t len = l->len - l->name;
	bool ruled = (l->dir->flags & DIR_LISTED) != 0, dir = l->type == TYPE_DIR;
	if (l->dir->flags & DIR_INNER) {
		if (l->type == TYPE_LNK || dir || t->ncovers > VJ_TREE_COVERS_MAX / 2)
			return dir ? 2 : 0;
		return cover(l, ITEM_INNER);
	}
	enum gi_verdict v = ruled ? verdict(l, l->path, l->len, dir ? GI_DIR : 0u) : GI_NONE;
	if (v == GI_MATCH && in_git(l) && git_own(l))
		v = GI_NONE;
	const struct tree_name *mask = t->nnames ? named(l, NAME_MASK, name, len) : NULL;
	if (l->type == TYPE_LNK) {
		if (v == GI_MATCH || mask || (ruled && verdict(l, l->path, l->len, GI_DIR) == GI_MATCH)) {
			t->links_dirty = true;
			tree_list_add(&t->links, l->path, l->len);
		}
	} else if (v == GI_MATCH || mask) {
		return cover(l, mask ? ITEM_PATH : 0u);
	} else if (t->nitems || t->nknown) {
		int err = tree_look_other_name(l);
		if (err)
			return err == 1 ? 0 : err;
	}
	if (t->live && ruled) {
		look_for_bare(l);
		if (!dir && !(l->dir->flags & DIR_DOTGIT))
			look_for_hazard(l);
	}
	if (l->type == TYPE_REG && ruled) {
		struct leaving ctx = {l, v == GI_NEGATED ? GI_FLOOR : 0u};
		if (gi_leaving(name, len, original_is_masked, &ctx) && !(in_git(l) && git_own(l)))
			return cover(l, ITEM_LEAVING);
	}
	const struct tree_name *protect = t->nnames ? named(l, NAME_PROTECT, name, len) : NULL;
	if (protect) {
		int err = protect_name(l);
		if (err)
			return err;
	}
	if (len == 4 && ruled && !(l->dir->flags & DIR_DOTGIT) &&
	    (memcmp(name, ".git", 4) == 0 || ((l->dir->flags & DIR_FOLD) && strcasecmp(name, ".git") == 0))) {
		if (tree_look_read(l) != 0)
			return 0;
		int err = tree_git_found(t, l->dir, l->path, l->len, l->o.mode);
		if (err)
			return err;
		return dir && (gi_names_git(t->rules) || !t->scanned);
	}
	return dir && ruled;
}

size_t tree_look_rel(const struct vj_tree *t, const struct vj_dir *d, const char *path)
{
	size_t n = t->workspace_len;
	if (memcmp(path, t->workspace, n) == 0 && (path[n] == '/' || path[n] == 0 || n == 1))
		return n == 1 ? 1 : n + 1;
	const struct vj_dir *root = d; /* outside: from the name of the granted directory on */
	while (root->parent)
		root = root->parent;
	size_t at = root->len;
	while (at > 0 && root->name[at - 1] != '/')
		at--;
	return at;
}
