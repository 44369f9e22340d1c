/* treeaudit.c — git redirects and exec lines that appeared while the jail lived: found, moved away, reported.
 *
 * A bind cannot forbid a name that does not exist. What was there before the jail's first command (the baseline), and
 * what is read-only inside, is the host's; everything else of these kinds came from the jail or is treated as if it had.
 */
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
#include "msg.h"
#include "tree.h"

#define FINDINGS_MAX 256
#define TEXT_MAX 4096            /* bytes of what was found that are reported */
#define FILE_MAX (256 * 1024)    /* bytes of a config or todo that are looked at */
#define NESTING 8
#define DIRECTORIES_MAX 4096

struct finding {
	char *path, *text, *moved;
	const char *kind;
	int err;
};

struct audit {
	struct vj_tree *t;
	bool record; /* fill the baseline instead of looking for findings */
	struct finding found[FINDINGS_MAX];
	size_t n;
	unsigned budget;
	bool todo; /* a todo list exists: it may be changed in place, without an event */
	char *text;
};

static void found(struct audit *a, const char *path, const char *kind, const char *text, size_t len)
{
	struct finding *f = &a->found[a->n];
	if (a->n == FINDINGS_MAX)
		return;
	f->path = strdup(path);
	f->text = strndup(text, len < TEXT_MAX ? len : TEXT_MAX);
	f->kind = kind;
	if (!f->path || !f->text) {
		free(f->path);
		free(f->text);
		return;
	}
	a->n++;
	f->err = -tree_move_away(a->t, f->path, f->kind, &f->moved);
}

/* ---- the baseline: "path" for what is locked, "path\nhash" for todo lists ---- */

/* Was something at this path, or in this directory, found and could not be moved? Then it is no baseline. */
static bool still_there(const struct audit *a, const char *path)
{
	for (size_t i = 0; i < a->n; i++)
		if (a->found[i].err && strncmp(a->found[i].path, path, strlen(path)) == 0)
			return true;
	return false;
}

static bool known(struct audit *a, const char *path)
{
	if (a->record && !still_there(a, path))
		tree_list_add(&a->t->baseline, path, strlen(path));
	return a->record || tree_list_has(&a->t->baseline, path, strlen(path));
}

static bool known_text(struct audit *a, const char *path, const char *text, size_t len)
{
	char key[TREE_PATH_MAX + 16];
	snprintf(key, sizeof key, "%s\n%08x", path, tree_hash(text, len, (uint32_t)len));
	return known(a, key);
}

/* ---- what is looked at ---- */

static ssize_t read_text(struct audit *a, const char *path)
{
	struct stat st;
	int fd = tree_open_plain(path, O_RDONLY);
	if (fd < 0)
		return fd;
	ssize_t n = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? read(fd, a->text, FILE_MAX - 1) : -EINVAL;
	close(fd);
	a->text[n > 0 ? n : 0] = 0;
	return n;
}

static bool exists(const char *path)
{
	struct tree_object o;
	return tree_stat(path, &o) == 0;
}

struct settings {
	char text[TEXT_MAX];
	size_t len;
};

static bool collect(void *ctx, const struct gitconfig_entry *e)
{
	struct settings *s = ctx;
	if (!gitconfig_runs(e))
		return true;
	int n = snprintf(s->text + s->len, sizeof s->text - s->len, "%s = %s\n", e->name, e->value);
	s->len = n > 0 && s->len + (size_t)n < sizeof s->text ? s->len + (size_t)n : sizeof s->text - 1;
	return s->len + 1 < sizeof s->text;
}

static void inspect_config(struct audit *a, const char *gitdir, const char *name)
{
	char path[TREE_PATH_MAX];
	struct settings s = {.len = 0};
	if (tree_join(path, sizeof path, gitdir, name) < 0 || !exists(path) || known(a, path))
		return;
	ssize_t n = read_text(a, path);
	if (n == -ELOOP) { /* a symlink to configuration elsewhere */
		found(a, path, "config", "symlink", 7);
	} else if (n > 0) {
		gitconfig_each(a->text, (size_t)n, collect, &s);
		if (s.len)
			found(a, path, "config", s.text, s.len);
	}
}

static void inspect_hooks(struct audit *a, const char *gitdir)
{
	char dir[TREE_PATH_MAX], path[TREE_PATH_MAX];
	if (tree_join(dir, sizeof dir, gitdir, "hooks") < 0 || !exists(dir) || known(a, dir))
		return;
	int fd = tree_open_plain(dir, O_RDONLY | O_DIRECTORY);
	if (fd < 0) {
		if (fd == -ELOOP || fd == -ENOTDIR)
			found(a, dir, "hook", "not a directory", 15);
		return;
	}
	DIR *d = fdopendir(fd);
	if (!d) {
		close(fd);
		return;
	}
	for (struct dirent *e; (e = readdir(d));) {
		size_t len = strlen(e->d_name);
		bool sample = len > 7 && strcmp(e->d_name + len - 7, ".sample") == 0;
		if (sample || !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") ||
		    tree_join(path, sizeof path, dir, e->d_name) < 0)
			continue;
		ssize_t n = read_text(a, path);
		found(a, path, "hook", a->text, n > 0 ? (size_t)n : 0);
	}
	closedir(d);
}

static void inspect_file(struct audit *a, const char *gitdir, const char *name, const char *kind)
{
	char path[TREE_PATH_MAX];
	if (tree_join(path, sizeof path, gitdir, name) < 0 || !exists(path) || known(a, path))
		return;
	ssize_t n = read_text(a, path);
	found(a, path, kind, a->text, n > 0 ? (size_t)n : 0);
}

/* exec lines of an interactive rebase, `exec CMD` or `x CMD`, git-rebase(1); a symlink on the way is the agent's. */
static void inspect_todo(struct audit *a, const char *gitdir, const char *name)
{
	char path[TREE_PATH_MAX], lines[TEXT_MAX];
	size_t len = 0;
	if (tree_join(path, sizeof path, gitdir, name) < 0)
		return;
	ssize_t n = read_text(a, path);
	if (n == -ELOOP)
		n = snprintf(a->text, FILE_MAX, "exec (symlink)\n");
	a->todo = a->todo || n > 0;
	if (n <= 0 || known_text(a, path, a->text, (size_t)n))
		return;
	for (const char *p = a->text; *p;) {
		size_t line = strcspn(p, "\n");
		const char *q = p + strspn(p, " \t");
		bool runs = strncmp(q, "exec", 4) == 0 ? (q[4] == ' ' || q[4] == '\t')
						      : q[0] == 'x' && (q[1] == ' ' || q[1] == '\t');
		if (runs && len + line + 1 < sizeof lines) {
			memcpy(lines + len, p, line);
			len += line;
			lines[len++] = '\n';
		}
		p += line + (p[line] == '\n');
	}
	if (len)
		found(a, path, "todo", lines, len);
}

/* The commondir of a worktree's git directory must be what holds `worktrees/NAME`; no other git directory has one. */
static void inspect_commondir(struct audit *a, const char *gitdir, bool worktree)
{
	char path[TREE_PATH_MAX], common[TREE_PATH_MAX], expected[TREE_PATH_MAX], real[TREE_PATH_MAX];
	struct tree_object o;
	if (tree_join(path, sizeof path, gitdir, "commondir") < 0 || !exists(path) || known(a, path))
		return;
	const char *name = strrchr(gitdir, '/');
	if (worktree && name && tree_read_pointer(path, "", gitdir, common, sizeof common)) {
		snprintf(expected, sizeof expected, "%.*s/..", (int)(name - gitdir), gitdir);
		if (tree_resolve(expected, real, sizeof real, &o) > 0 && strcmp(real, common) == 0)
			return;
	}
	ssize_t n = read_text(a, path);
	found(a, path, "commondir", a->text, n > 0 ? (size_t)n : 0);
}

static void inspect_gitdir(struct audit *a, const char *gitdir, bool worktree)
{
	inspect_commondir(a, gitdir, worktree);
	inspect_config(a, gitdir, "config");
	inspect_config(a, gitdir, "config.worktree");
	inspect_hooks(a, gitdir);
	inspect_file(a, gitdir, "objects/info/alternates", "alternates");
	inspect_file(a, gitdir, "objects/info/http-alternates", "alternates");
	inspect_todo(a, gitdir, "rebase-merge/git-rebase-todo");
	inspect_todo(a, gitdir, "rebase-merge/done");
	inspect_todo(a, gitdir, "rebase-apply/git-rebase-todo");
	inspect_todo(a, gitdir, "sequencer/todo");
}

static void inspect_below(struct audit *a, const char *dir, int depth, bool worktrees)
{
	char path[TREE_PATH_MAX], inner[TREE_PATH_MAX];
	struct tree_object o;
	int fd = tree_open_plain(dir, O_RDONLY | O_DIRECTORY);
	DIR *d = fd < 0 ? NULL : fdopendir(fd);
	if (!d) {
		if (fd >= 0)
			close(fd);
		return;
	}
	for (struct dirent *e; (e = readdir(d)) && a->budget;) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") ||
		    tree_join(path, sizeof path, dir, e->d_name) < 0 || tree_stat(path, &o) != 0 || !S_ISDIR(o.mode))
			continue;
		a->budget--;
		bool repository = tree_join(inner, sizeof inner, path, "HEAD") > 0 && exists(inner);
		if (repository || worktrees)
			inspect_gitdir(a, path, worktrees);
		if (repository && !worktrees && depth > 0 && tree_join(inner, sizeof inner, path, "modules") > 0)
			inspect_below(a, inner, depth - 1, false);
		else if (!repository && !worktrees && depth > 0)
			inspect_below(a, path, depth - 1, false);
	}
	closedir(d);
}

static void inspect_repository(struct audit *a, const char *gitdir)
{
	char path[TREE_PATH_MAX];
	a->budget = DIRECTORIES_MAX;
	inspect_gitdir(a, gitdir, false);
	if (tree_join(path, sizeof path, gitdir, "modules") > 0)
		inspect_below(a, path, NESTING, false);
	if (tree_join(path, sizeof path, gitdir, "worktrees") > 0)
		inspect_below(a, path, 0, true);
}

/* A pointer file leads to a worktree's or submodule's git directory, a symlink to any. Only what lies inside a
 * writable grant can be the agent's. */
static void inspect_git(struct audit *a, const struct tree_git *g)
{
	char real[TREE_PATH_MAX], common[TREE_PATH_MAX], path[TREE_PATH_MAX], worktree[TREE_PATH_MAX];
	struct tree_object o;
	ssize_t n = tree_resolve(g->path, real, sizeof real, &o);
	if (n < 0)
		return;
	snprintf(worktree, sizeof worktree, "%.*s", (int)(strrchr(g->path, '/') - g->path), g->path);
	if (!S_ISDIR(o.mode) && !tree_read_pointer(g->path, "gitdir: ", worktree, real, sizeof real))
		return;
	const struct tree_root *root = tree_root_of(a->t, real, strlen(real));
	if (!root || !root->writable)
		return;
	if (S_ISDIR(o.mode)) {
		inspect_repository(a, real);
		return;
	}
	bool linked = tree_join(path, sizeof path, real, "commondir") > 0 && exists(path);
	a->budget = DIRECTORIES_MAX;
	if (linked && tree_read_pointer(path, "", real, common, sizeof common)) {
		const struct tree_root *at = tree_root_of(a->t, common, strlen(common));
		if (at && at->writable)
			inspect_repository(a, common);
	}
	if (linked)
		inspect_gitdir(a, real, true);
	else
		inspect_repository(a, real);
}

/* ---- the calls ---- */

static struct audit *audit_new(struct vj_tree *t, bool record)
{
	struct audit *a = calloc(1, sizeof *a);
	if (!a)
		return NULL;
	a->t = t;
	a->record = record;
	a->text = malloc(FILE_MAX);
	if (!a->text) {
		free(a);
		return NULL;
	}
	return a;
}

static void audit_free(struct audit *a)
{
	for (size_t i = 0; a && i < a->n; i++) {
		free(a->found[i].path);
		free(a->found[i].text);
		free(a->found[i].moved);
	}
	if (a)
		free(a->text);
	free(a);
}

int tree_audit_baseline(struct vj_tree *t)
{
	struct audit *a = t->git == VJ_GIT_OFF ? NULL : audit_new(t, true);
	if (!a)
		return t->git == VJ_GIT_OFF ? 0 : -ENOMEM;
	for (size_t i = 0; i < t->ngits; i++) {
		a->todo = false;
		inspect_git(a, &t->gits[i]);
		t->gits[i].audited = !a->todo;
	}
	audit_free(a);
	return 0;
}

static int encode(const struct audit *a, uint8_t **buf, size_t *len)
{
	struct mp_writer w;
	size_t size = 16;
	for (size_t i = 0; a && i < a->n; i++)
		size += strlen(a->found[i].path) + strlen(a->found[i].text) + 64 +
			(a->found[i].moved ? strlen(a->found[i].moved) : 0);
	*buf = malloc(size);
	if (!*buf)
		return -ENOMEM;
	mp_writer_init(&w, *buf, size);
	mp_write_array(&w, a ? (uint32_t)a->n : 0);
	for (size_t i = 0; a && i < a->n; i++) {
		const struct finding *f = &a->found[i];
		mp_write_array(&w, 5);
		mp_write_bin(&w, f->path, strlen(f->path));
		mp_write_str(&w, f->kind);
		mp_write_bin(&w, f->text, strlen(f->text));
		if (f->moved)
			mp_write_bin(&w, f->moved, strlen(f->moved));
		else
			mp_write_nil(&w);
		mp_write_int(&w, f->err);
	}
	*len = w.len;
	return w.overflow ? -E2BIG : a ? (int)a->n : 0;
}

int vj_tree_git_audit(struct vj_tree *t, int idle, uint8_t **buf, size_t *len)
{
	struct audit *a = NULL;
	pthread_mutex_lock(&t->lock);
	for (size_t i = 0; i < t->ngits && t->git != VJ_GIT_OFF; i++) {
		struct tree_git *g = &t->gits[i];
		if (idle && g->late && !g->settled)
			g->settled = t->gits_dirty = true;
		if (g->audited || (t->git == VJ_GIT_READ_ONLY && !g->late))
			continue;
		if (!a && !(a = audit_new(t, false))) {
			pthread_mutex_unlock(&t->lock);
			return -ENOMEM;
		}
		a->record = a->todo = false;
		inspect_git(a, g);
		/* a repository that the agent made is looked at each time: it may hold its directories open */
		g->audited = !a->todo && !g->late;
		if (g->late)
			continue;
		a->record = true; /* what stays is harmless and read-only from now on: the host may change it */
		inspect_git(a, g);
	}
	int n = encode(a, buf, len);
	audit_free(a);
	pthread_mutex_unlock(&t->lock);
	return n;
}
