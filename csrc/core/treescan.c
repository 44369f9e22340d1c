/* treescan.c — the walk: one pass with getdents64 and almost no stat, and the decision about each name. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
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
enum { TYPE_UNKNOWN = 0, TYPE_DIR = 4, TYPE_REG = 8, TYPE_LNK = 10 };

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

/* ---- file systems ---- */

enum fs_kind { FS_PLAIN, FS_PSEUDO, FS_MAY_FOLD, FS_FOLDS, FS_REMOTE };

/* Can a directory of ext4 ignore case on this kernel? Asking once spares a call for each directory. */
static bool ext4_folds(void)
{
	static int known; /* 0 not asked, 1 no, 2 yes; the same answer in every thread */
	if (!known)
		known = access("/sys/fs/ext4", F_OK) == 0 && access("/sys/fs/ext4/features/casefold", F_OK) != 0 ? 1 : 2;
	return known == 2;
}

static enum fs_kind fs_of(int fd)
{
	static const uint32_t pseudo[] = {0x9fa0, 0x62656572, 0x27e0eb, 0x63677270, 0x1cd1, 0x64626720, 0x74726163,
					  0xcafe4a11, 0x73636673, 0x19800202, 0x62656570, 0x65735543, 0xde5e81e4,
					  0x6165676c, 0x0187};
	static const uint32_t remote[] = {0x6969, 0xfe534d42, 0xff534d42, 0x517b, 0x65735546, 0x01021997, 0x00c36400};
	struct statfs fs;
	if (fstatfs(fd, &fs) != 0)
		return FS_PLAIN;
	uint32_t magic = (uint32_t)fs.f_type;
	for (size_t i = 0; i < sizeof pseudo / sizeof *pseudo; i++)
		if (magic == pseudo[i])
			return FS_PSEUDO;
	if (magic == 0xff534d42 || magic == 0xfe534d42 || magic == 0x517b || magic == 0x4d44 || magic == 0x2011bab0 ||
	    magic == 0x5346544e || magic == 0x7366746e)
		return FS_FOLDS; /* CIFS, FAT, exFAT, NTFS */
	for (size_t i = 0; i < sizeof remote / sizeof *remote; i++)
		if (magic == remote[i])
			return FS_REMOTE;
	/* ext4, f2fs, tmpfs: a flag of the directory */
	return (magic == 0xef53 && ext4_folds()) || magic == 0xf2f52010 || magic == 0x01021994 ? FS_MAY_FOLD : FS_PLAIN;
}

static bool folds(int fd, enum fs_kind kind)
{
	long flags = 0; /* FS_IOC_GETFLAGS, FS_CASEFOLD_FL: ioctl_iflags(2), Linux 5.2 */
	return kind == FS_FOLDS || (kind == FS_MAY_FOLD && syscall(SYS_ioctl, fd, 0x80086601ul, &flags) == 0 && (flags & 0x40000000));
}

/* ---- the decision about one name ---- */

struct look {
	struct vj_tree *t;
	struct vj_dir *dir;
	int fd; /* of the directory, or −1: stat by path */
	const char *path;
	size_t len, name; /* offset of the last name */
	size_t rel;
	unsigned type;
	uint64_t ino;
	struct tree_object o; /* mode 0: not read yet */
};

static int read_object(struct look *l)
{
	if (l->o.mode)
		return 0;
	return l->fd >= 0 ? tree_stat_at(l->fd, l->path + l->name, &l->o) : tree_stat(l->path, &l->o);
}

static unsigned rule_flags(const struct look *l)
{
	bool inside = l->len > l->t->workspace_len && memcmp(l->path, l->t->workspace, l->t->workspace_len) == 0 &&
		      (l->path[l->t->workspace_len] == '/' || l->t->workspace_len == 1);
	return (l->dir->flags & DIR_FOLD ? GI_FOLD : 0u) | (l->dir->flags & DIR_DOTGIT ? GI_DOTGIT : 0u) |
	       (inside ? 0u : GI_OUTSIDE);
}

static const struct tree_name *named(const struct look *l, enum name_kind kind, const char *name, size_t name_len)
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

static enum gi_verdict verdict(const struct look *l, const char *path, size_t len, unsigned more)
{
	struct gi_path p = {path, len, l->rel, l->name};
	return gi_match(l->t->rules, &p, rule_flags(l) | more);
}

struct leaving {
	const struct look *l;
	unsigned flags;
};

static bool original_is_masked(void *ctx, const char *name, size_t len)
{
	const struct leaving *v = ctx;
	const struct look *l = v->l;
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

static int cover(struct look *l, unsigned flags)
{
	int err = read_object(l);
	if (err)
		return err == -ENOENT ? 0 : err;
	if (S_ISLNK(l->o.mode))
		return 0;
	if (!S_ISDIR(l->o.mode) && l->o.nlink > 1)
		l->t->alias_wanted = true;
	return tree_item_add(l->t, l->path, l->len, ITEM_COVER, flags, &l->o);
}

/* Is this an object that is covered or protected under another name? 1: yes, an item was made. */
static int other_name(struct look *l)
{
	struct vj_tree *t = l->t;
	struct vj_item *it = tree_item_of(t, l->ino);
	bool lost = t->nknown && tree_knows_inode(t, l->ino);
	if ((!it && !lost) || read_object(l) != 0)
		return 0;
	for (; it; it = it->same_object) {
		bool same = it->object.ino == l->o.ino && it->object.dev == l->o.dev && it->object.btime == l->o.btime;
		if (!same || (it->len == l->len && memcmp(it->path, l->path, l->len) == 0))
			continue;
		bool link = !S_ISDIR(l->o.mode) && l->o.nlink > 1;
		if (it->what == ITEM_COVER) {
			int err = cover(l, link ? ITEM_ALIAS : ITEM_HISTORY);
			return err ? err : 1;
		}
		if (it->what == ITEM_RO && link) {
			int err = tree_protect(t, l->path, l->len, ITEM_ALIAS, &l->o);
			return err ? err : 1;
		}
	}
	if (lost && tree_known_take(t, &l->o)) {
		int err = cover(l, ITEM_HISTORY);
		return err ? err : 1;
	}
	return 0;
}

static int protect_name(struct look *l, const struct tree_name *n)
{
	struct vj_tree *t = l->t;
	if (read_object(l) != 0)
		return 0;
	if (t->scanned && !t->policy_existed && n->parent_len == t->workspace_len &&
	    strcmp(l->path + l->name, "vectora.toml") == 0)
		tree_list_add(&t->planted, l->path, l->len);
	return tree_protect(t, l->path, l->len, ITEM_PATH, &l->o);
}

/* < 0: error, 0: done with this name, 1: a directory to walk. */
static int decide(struct look *l)
{
	struct vj_tree *t = l->t;
	const char *name = l->path + l->name;
	size_t len = l->len - l->name;
	bool ruled = (l->dir->flags & DIR_LISTED) != 0, dir = l->type == TYPE_DIR;
	enum gi_verdict v = ruled ? verdict(l, l->path, l->len, dir ? GI_DIR : 0u) : GI_NONE;
	const struct tree_name *mask = t->nnames ? named(l, NAME_MASK, name, len) : NULL;
	if (l->type == TYPE_LNK) {
		if (v == GI_MATCH || mask || (ruled && verdict(l, l->path, l->len, GI_DIR) == GI_MATCH)) {
			t->links_dirty = true;
			tree_list_add(&t->links, l->path, l->len);
		}
	} else if (v == GI_MATCH || mask) {
		return cover(l, mask ? ITEM_PATH : 0u);
	} else if (t->nitems || t->nknown) {
		int err = other_name(l);
		if (err)
			return err < 0 ? err : 0;
	}
	if (l->type == TYPE_REG && ruled) {
		struct leaving ctx = {l, v == GI_NEGATED ? GI_FLOOR : 0u};
		if (gi_leaving(name, len, original_is_masked, &ctx))
			return cover(l, ITEM_LEAVING);
	}
	const struct tree_name *protect = t->nnames ? named(l, NAME_PROTECT, name, len) : NULL;
	if (protect) {
		int err = protect_name(l, protect);
		if (err)
			return err;
	}
	if (len == 4 && ruled && !(l->dir->flags & DIR_DOTGIT) &&
	    (memcmp(name, ".git", 4) == 0 || ((l->dir->flags & DIR_FOLD) && strcasecmp(name, ".git") == 0))) {
		if (read_object(l) != 0)
			return 0;
		int err = tree_git_found(t, l->dir, l->path, l->len, l->o.mode);
		if (err)
			return err;
		return dir && gi_names_git(t->rules);
	}
	return dir && ruled;
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

static size_t rel_of(const struct vj_tree *t, const struct vj_dir *d, const char *path)
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

/* A directory that we cannot list may still be open by name, or be opened by its owner (us, inside the jail) later. */
static int unreadable(struct vj_tree *t, struct vj_dir *d, const char *path, size_t len)
{
	struct tree_object o;
	if (tree_stat(path, &o) != 0 || !S_ISDIR(o.mode) || (d->flags & DIR_ROOT))
		return 0;
	if (o.uid != geteuid() && faccessat(AT_FDCWD, path, X_OK, AT_EACCESS) != 0)
		return 0;
	tree_list_add(&t->hazards, path, len);
	return tree_item_add(t, path, len, ITEM_COVER, 0, &o);
}

static int child_dir(struct tree_walk *w, struct vj_dir *d, const struct look *l)
{
	struct vj_tree *t = w->t;
	const char *name = l->path + l->name;
	unsigned flags = d->flags & (DIR_WRITABLE | DIR_DOTGIT);
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

static int visit(struct tree_walk *w, struct vj_dir *d, struct look *l, const struct entry *e)
{
	size_t len = strlen(e->name);
	if (e->name[0] == '.' && (len == 1 || (len == 2 && e->name[1] == '.')))
		return 0;
	w->entries++;
	if (over_limit(w))
		return 0;
	if (l->name + len >= TREE_PATH_MAX) {
		tree_incomplete(w->t, "a path is longer than 4,096 bytes");
		return 0;
	}
	memcpy(w->path + l->name, e->name, len + 1);
	l->len = l->name + len;
	l->type = e->type;
	l->ino = e->ino;
	l->o.mode = 0;
	if (e->type == TYPE_UNKNOWN) {
		if (read_object(l) != 0)
			return 0;
		l->type = S_ISDIR(l->o.mode) ? TYPE_DIR : S_ISLNK(l->o.mode) ? TYPE_LNK : TYPE_REG;
	}
	if (w->aliases) {
		int err = l->type == TYPE_LNK ? 0 : other_name(l);
		return err < 0 ? err : l->type == TYPE_DIR ? child_dir(w, d, l) : 0;
	}
	int r = decide(l);
	return r == 1 ? child_dir(w, d, l) : r;
}

static int list(struct tree_walk *w, struct vj_dir *d, char *buffer, enum fs_kind *kind)
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
		return 0;
	}
	if (fstat(fd, &st) != 0) {
		close(fd);
		return 0;
	}
	if (!d->parent || d->parent->dev != st.st_dev)
		*kind = fs_of(fd);
	if (*kind == FS_PSEUDO) {
		close(fd);
		return 0;
	}
	if (*kind == FS_REMOTE && !t->reason[0])
		snprintf(t->reason, sizeof t->reason, "a network or FUSE file system: only local edits are seen");
	d->dev = st.st_dev;
	if (!w->aliases) {
		d->flags |= DIR_LISTED;
		d->flags = (uint16_t)(folds(fd, *kind) ? d->flags | DIR_FOLD : d->flags & ~DIR_FOLD);
		tree_watch_add(t, d, w->path); /* before its names are read: what comes later is an event */
		t->ndirs_seen++;
	}
	struct look l = {.t = t, .dir = d, .fd = fd, .path = w->path};
	if (len > 1)
		w->path[len++] = '/';
	l.name = (size_t)len;
	w->path[len] = 0;
	l.rel = rel_of(t, d, w->path);
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
	return err;
}

static int walk(struct tree_walk *w, struct vj_dir *d)
{
	enum fs_kind kind = FS_PLAIN;
	uint64_t dev = UINT64_MAX;
	char *buffer = malloc(BUFFER);
	int err = buffer ? push(w, d) : -ENOMEM;
	while (!err && w->depth && !w->stop) {
		struct vj_dir *next = w->stack[--w->depth];
		if (next->parent && next->parent->dev != dev) { /* coming back from another file system */
			char path[TREE_PATH_MAX];
			int fd = tree_dir_path(next->parent, path, sizeof path) < 0 ? -1 : open_dir(path);
			if (fd >= 0) {
				kind = fs_of(fd);
				close(fd);
			}
		}
		err = list(w, next, buffer, &kind);
		dev = next->dev;
	}
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

int tree_look(struct vj_tree *t, struct vj_dir *d, const char *name, size_t len)
{
	char path[TREE_PATH_MAX + 512];
	ssize_t dir_len = tree_dir_path(d, path, TREE_PATH_MAX);
	if (dir_len < 0 || (size_t)dir_len + len + 1 >= TREE_PATH_MAX)
		return 0;
	if (dir_len > 1)
		path[dir_len++] = '/';
	memcpy(path + dir_len, name, len);
	path[(size_t)dir_len + len] = 0;
	struct look l = {.t = t, .dir = d, .fd = -1, .path = path, .len = (size_t)dir_len + len, .name = (size_t)dir_len};
	if (read_object(&l) != 0)
		return 0;
	l.rel = rel_of(t, d, path);
	l.ino = l.o.ino;
	l.type = S_ISDIR(l.o.mode) ? TYPE_DIR : S_ISLNK(l.o.mode) ? TYPE_LNK : TYPE_REG;
	int r = decide(&l);
	if (r != 1)
		return r;
	struct tree_walk *w = malloc(sizeof *w);
	if (!w)
		return -ENOMEM;
	begin(w, t, false);
	int err = child_dir(w, d, &l);
	if (!err && w->depth) {
		struct vj_dir *c = w->stack[--w->depth];
		err = walk(w, c);
	}
	t->entries += w->entries;
	free(w);
	return err;
}

/* ---- names and links ---- */

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
		tree_watch_add(t, d, path);
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

/* ---- the whole tree ---- */

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
	struct vj_dir *d = tree_dir_new(t, NULL, r->path, r->len, DIR_ROOT | (r->writable ? DIR_WRITABLE : 0u));
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
		t->policy_existed = tree_stat(policy, &o) == 0;
		if (!err)
			err = tree_audit_baseline(t);
	}
	t->scanned = true;
	t->ms = (double)(tree_now_ns() - started) / 1e6;
	if (err == -E2BIG)
		tree_incomplete(t, "more than 50,000 covers");
	return err;
}
