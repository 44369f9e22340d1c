/* treegit.c — every `.git` of the tree: what is read-only, what is pinned, what is watched (gitrepository-layout(5)). */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "gitconfig.h"
#include "tree.h"

#define POINTER_MAX 8192    /* bytes of a pointer file or of the part of a config that is looked at */
#define CONFIG_MAX (256 * 1024)
#define MODULES_DEPTH 8     /* modules/a/b/c...: submodule names may hold slashes */
#define MODULES_MAX 4096

int tree_join(char *out, size_t cap, const char *dir, const char *name)
{
	int n = snprintf(out, cap, "%s/%s", strcmp(dir, "/") ? dir : "", name);
	return n > 0 && (size_t)n < cap ? n : -ENAMETOOLONG;
}

/* A small regular file, at once and whole; never a FIFO. Returns its length, or −errno. */
ssize_t tree_read_small(const char *path, char *out, size_t cap)
{
	struct stat st;
	int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	ssize_t n = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? read(fd, out, cap - 1) : -1;
	int err = n < 0 ? (errno ? -errno : -EINVAL) : 0;
	close(fd);
	if (err)
		return err;
	out[n] = 0;
	return n;
}

static int protect_path(struct vj_tree *t, const char *path)
{
	struct tree_object o;
	if (tree_stat(path, &o) != 0 || S_ISLNK(o.mode))
		return 0;
	return tree_protect(t, path, strlen(path), 0, &o);
}

/* The same, through a symlink: where it leads is protected if that lies inside a writable grant. */
static int protect_target(struct vj_tree *t, const char *path)
{
	char real[TREE_PATH_MAX];
	struct tree_object o;
	ssize_t n = tree_resolve(path, real, sizeof real, &o);
	if (n < 0 || real[0] != '/')
		return 0;
	return tree_protect(t, real, (size_t)n, strcmp(path, real) ? ITEM_LINK : 0u, &o);
}

/* Watch one directory for git's sake. NULL: it does not exist (or no memory). */
static struct vj_dir *watch(struct vj_tree *t, const char *path)
{
	struct tree_object o;
	size_t len = strlen(path);
	if (tree_stat(path, &o) != 0 || !S_ISDIR(o.mode))
		return NULL;
	/* below a walked root it must hang there, so that a moved parent takes it along */
	struct vj_dir *d = NULL;
	for (struct vj_dir *top = t->tops; top; top = top->next)
		if (!(top->flags & (DIR_GIT | DIR_ANCHOR)) && len > top->len && memcmp(path, top->name, top->len) == 0 &&
		    (path[top->len] == '/' || top->len == 1))
			d = top;
	if (!d) {
		d = tree_dir_new(t, NULL, path, len, DIR_GIT);
	} else {
		for (size_t at = d->len == 1 ? 1 : d->len + 1, end; d && at < len; at = end + 1) {
			for (end = at; end < len && path[end] != '/';)
				end++;
			d = tree_dir_new(t, d, path + at, end - at, DIR_GIT | (d->flags & DIR_WRITABLE));
		}
	}
	if (d)
		tree_watch_add(t, d, -1, path);
	return d;
}

/* ---- core.hooksPath ---- */

static bool last_hooks_path(void *ctx, const struct gitconfig_entry *e)
{
	if (strcmp(e->name, "core.hookspath") == 0 && !e->has_subsection)
		snprintf(ctx, GITCONFIG_VALUE_MAX, "%s", e->value); /* the last one counts */
	return true;
}

static int protect_hooks_path(struct vj_tree *t, const char *gitdir, const char *worktree)
{
	char path[TREE_PATH_MAX], value[GITCONFIG_VALUE_MAX] = "", real[TREE_PATH_MAX];
	if (tree_join(path, sizeof path, gitdir, "config") < 0)
		return 0;
	char *text = malloc(CONFIG_MAX);
	if (!text)
		return -ENOMEM;
	ssize_t n = tree_read_small(path, text, CONFIG_MAX);
	if (n > 0)
		gitconfig_each(text, (size_t)n, last_hooks_path, value);
	free(text);
	if (!value[0] || value[0] == '~')
		return 0;
	if (value[0] == '/')
		return protect_target(t, value);
	return tree_join(real, sizeof real, worktree, value) < 0 ? 0 : protect_target(t, real);
}

/* ---- one git directory ---- */

/* objects/info stays writable: gc and commit-graph write there; an alternates file that appears is found by the audit. */
static const char *const LOCKED_DIRS[] = {"hooks", "info"};
static const char *const LOCKED_FILES[] = {"config", "config.worktree", "commondir", "gitdir",
					   "objects/info/alternates", "objects/info/http-alternates"};

static int lock_config(struct vj_tree *t, const char *gitdir)
{
	char path[TREE_PATH_MAX];
	struct tree_object o;
	size_t len = strlen(gitdir);
	const struct tree_root *root = tree_root_of(t, gitdir, len);
	if (!root || !root->writable || tree_stat(gitdir, &o) != 0 || !S_ISDIR(o.mode))
		return 0;
	int err = len > root->len ? tree_pin(t, gitdir, len, &o) : 0;
	if (!err)
		err = tree_pin_parents(t, gitdir, len);
	for (size_t i = 0; i < sizeof LOCKED_DIRS / sizeof *LOCKED_DIRS && !err; i++)
		if (tree_join(path, sizeof path, gitdir, LOCKED_DIRS[i]) > 0)
			err = protect_target(t, path);
	for (size_t i = 0; i < sizeof LOCKED_FILES / sizeof *LOCKED_FILES && !err; i++)
		if (tree_join(path, sizeof path, gitdir, LOCKED_FILES[i]) > 0)
			err = protect_target(t, path);
	watch(t, gitdir);
	if (tree_join(path, sizeof path, gitdir, "objects/info") > 0)
		watch(t, path);
	return err;
}

/* Git directories below `modules` or `worktrees`: those with a HEAD, however deep their names nest. */
static int lock_below(struct vj_tree *t, const char *dir, int depth, unsigned *budget)
{
	char path[TREE_PATH_MAX], head[TREE_PATH_MAX];
	struct tree_object o;
	int err = 0;
	if (!watch(t, dir))
		return 0;
	DIR *d = opendir(dir);
	if (!d)
		return 0;
	for (struct dirent *e; !err && (e = readdir(d));) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || tree_join(path, sizeof path, dir, e->d_name) < 0 ||
		    tree_stat(path, &o) != 0 || !S_ISDIR(o.mode))
			continue;
		if ((*budget)-- == 0) {
			*budget = 0;
			tree_incomplete(t, "more git modules and worktrees than can be protected");
			break;
		}
		bool repository = tree_join(head, sizeof head, path, "HEAD") > 0 && tree_stat(head, &o) == 0;
		if (repository)
			err = lock_config(t, path);
		if (!err && repository && tree_join(head, sizeof head, path, "modules") > 0 && depth > 0)
			err = lock_below(t, head, depth - 1, budget);
		else if (!err && !repository && depth > 0)
			err = lock_below(t, path, depth - 1, budget);
	}
	closedir(d);
	return err;
}

static int lock_gitdir(struct vj_tree *t, const char *gitdir, const char *worktree)
{
	char path[TREE_PATH_MAX];
	struct tree_object o;
	unsigned budget = MODULES_MAX;
	int err = 0;
	if (t->git == VJ_GIT_READ_ONLY) {
		err = tree_stat(gitdir, &o) ? 0 : tree_protect(t, gitdir, strlen(gitdir), 0, &o);
	} else {
		err = lock_config(t, gitdir);
		if (!err && tree_join(path, sizeof path, gitdir, "modules") > 0)
			err = lock_below(t, path, MODULES_DEPTH, &budget);
		if (!err && tree_join(path, sizeof path, gitdir, "worktrees") > 0)
			err = lock_below(t, path, 0, &budget);
	}
	if (!err && tree_join(path, sizeof path, gitdir, "hooks") > 0)
		err = protect_target(t, path); /* a symlink out of the git directory */
	return err ? err : protect_hooks_path(t, gitdir, worktree);
}

/* `gitdir: PATH` of a worktree's or submodule's pointer file, or the line of a `commondir` file: where it leads. */
bool tree_read_pointer(const char *file, const char *prefix, const char *base, char *out, size_t cap)
{
	char text[POINTER_MAX], path[TREE_PATH_MAX];
	struct tree_object o;
	ssize_t n = tree_read_small(file, text, sizeof text);
	size_t skip = strlen(prefix);
	if (n <= (ssize_t)skip || strncmp(text, prefix, skip) != 0)
		return false;
	text[strcspn(text, "\n\r")] = 0;
	const char *target = text + skip;
	if (target[0] != '/') {
		if (tree_join(path, sizeof path, base, target) < 0)
			return false;
		target = path;
	}
	return tree_resolve(target, out, cap, &o) > 0 && S_ISDIR(o.mode);
}

static int lock_pointer(struct vj_tree *t, const char *file, const char *worktree)
{
	char gitdir[TREE_PATH_MAX], path[TREE_PATH_MAX], common[TREE_PATH_MAX];
	int err = protect_path(t, file);
	if (err || !tree_read_pointer(file, "gitdir: ", worktree, gitdir, sizeof gitdir))
		return err;
	err = lock_gitdir(t, gitdir, worktree);
	if (!err && tree_join(path, sizeof path, gitdir, "commondir") > 0 &&
	    tree_read_pointer(path, "", gitdir, common, sizeof common))
		err = lock_gitdir(t, common, worktree);
	return err;
}

static int lock_one(struct vj_tree *t, const struct tree_git *g)
{
	char worktree[TREE_PATH_MAX], real[TREE_PATH_MAX];
	struct tree_object o;
	snprintf(worktree, sizeof worktree, "%.*s", (int)(strrchr(g->path, '/') - g->path), g->path);
	const struct tree_root *root = tree_root_of(t, g->path, strlen(g->path));
	if (t->git == VJ_GIT_OFF || !root || !root->writable || (g->late && !g->settled))
		return 0;
	if (g->kind == 'd')
		return lock_gitdir(t, g->path, worktree);
	if (g->kind == 'f')
		return lock_pointer(t, g->path, worktree);
	ssize_t n = tree_resolve(g->path, real, sizeof real, &o);
	if (n < 0)
		return 0;
	return S_ISDIR(o.mode) ? lock_gitdir(t, real, worktree) : lock_pointer(t, real, worktree);
}

/* Another repository is here than the one that the jail found: it is looked at like one that appears. */
static void renewed(const struct vj_tree *t, struct tree_git *g)
{
	if (!t->scanned)
		return;
	g->late = true;
	g->settled = g->audited = false;
}

static void follow(const struct vj_tree *t, struct tree_git *g)
{
	char real[TREE_PATH_MAX];
	struct tree_object o;
	if (tree_resolve(g->path, real, sizeof real, &o) < 0)
		memset(&o, 0, sizeof o);
	if (g->leads.ino && (o.ino != g->leads.ino || o.dev != g->leads.dev || o.btime != g->leads.btime))
		renewed(t, g);
	g->leads = o;
}

int tree_git_found(struct vj_tree *t, struct vj_dir *d, const char *path, size_t len, uint32_t mode)
{
	char kind = S_ISDIR(mode) ? 'd' : S_ISLNK(mode) ? 'l' : 'f';
	struct tree_git *g = NULL;
	(void)d;
	for (size_t i = 0; i < t->ngits && !g; i++)
		if (strlen(t->gits[i].path) == len && memcmp(t->gits[i].path, path, len) == 0)
			g = &t->gits[i];
	if (!g) {
		struct tree_git *more = realloc(t->gits, (t->ngits + 1) * sizeof *more);
		if (!more)
			return -ENOMEM;
		t->gits = more;
		g = &t->gits[t->ngits];
		memset(g, 0, sizeof *g);
		g->path = strndup(path, len);
		if (!g->path)
			return -ENOMEM;
		t->ngits++;
		g->late = t->scanned;
	} else if (g->kind == 'l' && kind != 'l') {
		renewed(t, g); /* nothing can be bound over a link: who replaced it may be the agent */
	}
	g->kind = kind;
	t->gits_dirty = true;
	return 0;
}

/* Protect every known `.git` again: what is protected already stays as it is, what is new is added. */
int tree_git_refresh(struct vj_tree *t)
{
	struct tree_object o;
	t->gits_dirty = false;
	for (size_t i = 0; i < t->ngits;) {
		struct tree_git *g = &t->gits[i];
		if (tree_stat(g->path, &o) != 0) {
			free(g->path);
			*g = t->gits[--t->ngits];
			continue;
		}
		g->kind = S_ISDIR(o.mode) ? 'd' : S_ISLNK(o.mode) ? 'l' : 'f';
		if (g->kind == 'l')
			follow(t, g);
		int err = lock_one(t, g);
		if (err)
			return err;
		i++;
	}
	return 0;
}

void tree_git_free(struct vj_tree *t)
{
	for (size_t i = 0; i < t->ngits; i++)
		free(t->gits[i].path);
	free(t->gits);
}
