/* treescan.c — the walk: one pass with getdents64 and almost no stat. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "tree.h"

#define BUFFER (64 * 1024)
#define CHECK_EVERY 512 /* entries between two looks at the clock */

/* getdents64(2) */
struct entry {
	uint64_t ino;
	int64_t off;
	uint16_t reclen;
	uint8_t type;
	char name[];
};

uint64_t tree_now_ns(void)
{
	struct timespec ts;
	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void tree_incomplete(struct vj_tree *t, const char *why)
{
	t->complete = false;
	if (!t->reason[0])
		snprintf(t->reason, sizeof t->reason, "%s", why);
}

static int open_dir(const char *path)
{
	struct vj_open_how how = {.flags = O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC,
				  .resolve = VJ_RESOLVE_NO_SYMLINKS | VJ_RESOLVE_NO_MAGICLINKS};
	int fd = (int)syscall(VJ_SYS_openat2, AT_FDCWD, path, &how, sizeof how);
	if (fd < 0 && errno == ENOSYS) /* before 5.6: only the last name is safe */
		fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

/* ---- the walk ---- */

static int push(struct tree_walk *w, struct vj_dir *d)
{
	if (w->depth == w->cap) {
		size_t cap = w->cap ? w->cap * 2 : 64;
		struct vj_dir **more = realloc(w->stack, cap * sizeof *more);
		if (!more)
			return -ENOMEM;
		w->stack = more;
		w->cap = cap;
	}
	w->stack[w->depth++] = d;
	return 0;
}

/* A directory that we cannot list may still be open by name, or be opened by its owner (us, inside the jail) later. */
static int unreadable(struct vj_tree *t, struct vj_dir *d, const char *path, size_t len)
{
	struct tree_object o;
	if (tree_stat(path, &o) != 0 || !S_ISDIR(o.mode) || (d->flags & DIR_ROOT))
		return 0;
	if (o.uid != geteuid() && faccessat(AT_FDCWD, path, X_OK, AT_EACCESS) != 0)
		return 0;
	tree_list_add(&t->unreadable, path, len);
	return tree_item_add(t, path, len, ITEM_COVER, 0, &o);
}

/* What could not be looked at is hidden whole: a command may have moved a secret where the walk does not reach. Only
 * before the first command; what moves there later takes its cover along. */
static int hide(const struct tree_walk *w, const struct vj_dir *d)
{
	char path[TREE_PATH_MAX];
	struct tree_object o;
	ssize_t len = tree_dir_path(d, path, sizeof path);
	if (w->t->scanned || w->aliases || len < 0 || tree_stat(path, &o) != 0 || !S_ISDIR(o.mode))
		return 0;
	return d->flags & DIR_ROOT ? -EFBIG : tree_item_add(w->t, path, (size_t)len, ITEM_COVER, 0, &o);
}

static int child_dir(struct tree_walk *w, struct vj_dir *d, const struct tree_look *l, bool inner)
{
	struct vj_tree *t = w->t;
	const char *name = l->path + l->name;
	unsigned flags = (d->flags & (DIR_WRITABLE | DIR_DOTGIT)) | (inner ? DIR_INNER : 0u);
	if (!(flags & DIR_DOTGIT) && strcasecmp(name, ".git") == 0)
		flags |= DIR_DOTGIT;
	for (size_t i = 0; i < t->nroots; i++)
		if (!t->roots[i].top && t->roots[i].len == l->len && memcmp(t->roots[i].path, l->path, l->len) == 0)
			flags = (flags & ~(unsigned)DIR_WRITABLE) | (t->roots[i].writable ? DIR_WRITABLE : 0u);
	struct vj_dir *c = w->aliases ? tree_dir_find(t, d, name, l->len - l->name)
				      : tree_dir_new(t, d, name, l->len - l->name, flags);
	if (!c)
		return w->aliases ? 0 : -ENOMEM;
	return push(w, c);
}

static bool over_limit(struct tree_walk *w)
{
	struct vj_tree *t = w->t;
	if (w->entries > t->max_entries) {
		tree_incomplete(t, "the walk stopped at its limit of entries");
		w->stop = true;
	} else if (w->entries % CHECK_EVERY == 0 && tree_now_ns() > w->deadline_ns) {
		tree_incomplete(t, "the walk stopped at its time limit");
		w->stop = true;
	}
	return w->stop;
}

static int visit(struct tree_walk *w, struct vj_dir *d, struct tree_look *l, const struct entry *e)
{
	size_t len = strlen(e->name);
	if (e->name[0] == '.' && (len == 1 || (len == 2 && e->name[1] == '.')))
		return 0;
	w->entries++;
	if (over_limit(w))
		return 0;
	if (l->name + len >= TREE_PATH_MAX) {
		tree_incomplete(w->t, "a path is longer than 4,096 bytes");
		return hide(w, d);
	}
	memcpy(w->path + l->name, e->name, len + 1);
	l->len = l->name + len;
	l->type = e->type;
	l->ino = e->ino;
	l->o.mode = 0;
	if (e->type == TYPE_UNKNOWN) {
		if (tree_look_read(l) != 0)
			return 0;
		l->type = S_ISDIR(l->o.mode) ? TYPE_DIR : S_ISLNK(l->o.mode) ? TYPE_LNK : TYPE_REG;
	}
	if (w->aliases) {
		int err = l->type == TYPE_LNK ? 0 : tree_look_other_name(l);
		return err < 0 ? err : l->type == TYPE_DIR ? child_dir(w, d, l, false) : 0;
	}
	int r = tree_look_decide(l);
	return r > 0 ? child_dir(w, d, l, r == 2) : r;
}

static int list(struct tree_walk *w, struct vj_dir *d, char *buffer, enum tree_fs *kind)
{
	struct vj_tree *t = w->t;
	ssize_t len = tree_dir_path(d, w->path, TREE_PATH_MAX);
	struct stat st;
	if (len < 0) {
		tree_incomplete(t, "a path is longer than 4,096 bytes");
		return 0;
	}
	int fd = open_dir(w->path);
	if (fd == -EACCES || fd == -EPERM)
		return w->aliases ? 0 : unreadable(t, d, w->path, (size_t)len);
	if (fd < 0) {
		if (fd != -ENOENT && fd != -ENOTDIR && fd != -ELOOP)
			tree_incomplete(t, strerror(-fd));
		else
			tree_lost(t, d);
		return 0;
	}
	if (fstat(fd, &st) != 0) {
		close(fd);
		return 0;
	}
	if (d->ino && (d->ino != st.st_ino || d->dev != st.st_dev)) { /* another directory has its name now */
		tree_lost(t, d);
		close(fd);
		return 0;
	}
	/* A jail's uid 0 has no capability over other users' directories: below a closed one nothing can be covered. */
	if (t->uid0 && st.st_uid && !(st.st_mode & (st.st_gid ? 01 : 010))) {
		close(fd);
		return w->aliases ? 0 : unreadable(t, d, w->path, (size_t)len);
	}
	if (!d->parent || d->parent->dev != st.st_dev)
		*kind = tree_fs_of(fd);
	if (*kind == FS_PSEUDO) {
		close(fd);
		return 0;
	}
	if (*kind == FS_REMOTE && !t->reason[0])
		snprintf(t->reason, sizeof t->reason, "a network or FUSE file system: only local edits are seen");
	d->dev = st.st_dev;
	d->ino = st.st_ino;
	if (!w->aliases) {
		d->flags |= DIR_LISTED;
		d->flags = (uint16_t)(tree_fs_folds(fd, *kind) ? d->flags | DIR_FOLD : d->flags & ~DIR_FOLD);
		if (!(d->flags & DIR_DOTGIT) || gi_names_git(t->rules)) /* git's own are watched by treegit.c */
			tree_watch_add(t, d, fd, w->path); /* before its names are read: what comes later is an event */
		t->ndirs_seen++;
	}
	struct tree_look l = {.t = t, .dir = d, .fd = fd, .path = w->path};
	if (len > 1)
		w->path[len++] = '/';
	l.name = (size_t)len;
	w->path[len] = 0;
	l.rel = tree_look_rel(t, d, w->path);
	int err = 0;
	for (;;) {
		long n = syscall(SYS_getdents64, fd, buffer, BUFFER);
		if (n < 0)
			tree_incomplete(t, strerror(errno));
		if (n <= 0)
			break;
		for (long at = 0; at < n && !err && !w->stop;) {
			const struct entry *e = (const struct entry *)(const void *)(buffer + at);
			err = visit(w, d, &l, e);
			at += e->reclen;
		}
		if (err || w->stop)
			break;
	}
	close(fd);
	return err || !w->stop ? err : hide(w, d);
}

static int walk(struct tree_walk *w, struct vj_dir *d)
{
	enum tree_fs kind = FS_PLAIN;
	uint64_t dev = UINT64_MAX;
	char *buffer = malloc(BUFFER);
	int err = buffer ? push(w, d) : -ENOMEM;
	while (!err && w->depth && !w->stop) {
		struct vj_dir *next = w->stack[--w->depth];
		if (next->parent && next->parent->dev != dev) { /* coming back from another file system */
			char path[TREE_PATH_MAX];
			int fd = tree_dir_path(next->parent, path, sizeof path) < 0 ? -1 : open_dir(path);
			if (fd >= 0) {
				kind = tree_fs_of(fd);
				close(fd);
			}
		}
		err = list(w, next, buffer, &kind);
		dev = next->dev;
	}
	while (!err && w->stop && w->depth)
		err = hide(w, w->stack[--w->depth]);
	w->depth = 0;
	free(buffer);
	free(w->stack);
	return err;
}

static void begin(struct tree_walk *w, struct vj_tree *t, bool aliases)
{
	memset(w, 0, offsetof(struct tree_walk, path));
	w->t = t;
	w->aliases = aliases;
	w->started_ns = tree_now_ns();
	w->deadline_ns = w->started_ns + t->max_ms * 1000000u;
}

int tree_walk_below(struct vj_tree *t, struct vj_dir *d)
{
	struct tree_walk *w = malloc(sizeof *w);
	if (!w)
		return -ENOMEM;
	begin(w, t, false);
	int err = walk(w, d);
	t->entries += w->entries;
	free(w);
	return err;
}

/* Look for the other names of hard-linked masked and protected files, by inode number. */
int tree_alias_pass(struct vj_tree *t)
{
	t->alias_wanted = false;
	for (struct vj_dir *d = t->tops; d; d = d->next) {
		struct tree_walk *w = malloc(sizeof *w);
		if (!w)
			return -ENOMEM;
		begin(w, t, true);
		int err = d->flags & DIR_ANCHOR ? 0 : walk(w, d);
		free(w);
		if (err)
			return err;
	}
	return 0;
}

int tree_look_at(struct vj_tree *t, struct vj_dir *d, const char *name, size_t len, bool *absent)
{
	char path[TREE_PATH_MAX + 512];
	ssize_t dir_len = tree_dir_path(d, path, TREE_PATH_MAX);
	if (dir_len < 0 || (size_t)dir_len + len + 1 >= TREE_PATH_MAX)
		return 0;
	if (dir_len > 1)
		path[dir_len++] = '/';
	memcpy(path + dir_len, name, len);
	path[(size_t)dir_len + len] = 0;
	struct tree_look l = {.t = t, .dir = d, .fd = -1, .path = path, .len = (size_t)dir_len + len, .name = (size_t)dir_len};
	int unread = tree_look_read(&l);
	*absent = unread == -ENOENT;
	if (d->ino && !tree_dir_in_place(d)) {
		*absent = false;
		tree_lost(t, d); /* what the event told of is somewhere else by now */
		return 0;
	}
	if (unread)
		return 0;
	l.rel = tree_look_rel(t, d, path);
	l.ino = l.o.ino;
	l.type = S_ISDIR(l.o.mode) ? TYPE_DIR : S_ISLNK(l.o.mode) ? TYPE_LNK : TYPE_REG;
	int r = tree_look_decide(&l);
	if (r <= 0)
		return r;
	struct tree_walk *w = malloc(sizeof *w);
	if (!w)
		return -ENOMEM;
	begin(w, t, false);
	int err = child_dir(w, d, &l, r == 2);
	if (!err && w->depth) {
		struct vj_dir *c = w->stack[--w->depth];
		err = walk(w, c);
	}
	t->entries += w->entries;
	free(w);
	return err;
}
