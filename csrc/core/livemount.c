/* livemount.c — private tree, read-only binds, pins and covers, each on the object that was looked at. */
#define _GNU_SOURCE
#include "livemount.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "child.h"
#include "kernel.h"
#include "msg.h"

#ifndef CLONE_NEWUSER
#define CLONE_NEWUSER 0x10000000
#endif

/* The covers of this jail, opened once a list of ops. */
struct covers {
	int fd[2]; /* file, directory; −1 = missing */
	struct stat st[2];
};

struct target {
	int fd;
	struct stat st;
	int is_root; /* the root of a mount */
};

int vj_ns_enter(int mntns_fd, int userns_fd)
{
	/* the user namespace that owns the mounts first: it gives the capabilities over them, setns(2) */
	if (userns_fd >= 0 && syscall(VJ_SYS_setns, userns_fd, CLONE_NEWUSER) != 0)
		return -errno;
	if (syscall(VJ_SYS_setns, mntns_fd, CLONE_NEWNS) != 0)
		return -errno;
	return chdir("/") != 0 ? -errno : 0;
}

static int open_exact(int dir, const char *path, uint64_t flags, uint64_t resolve)
{
	struct vj_open_how how = {.flags = flags | O_CLOEXEC,
				  .resolve = resolve | VJ_RESOLVE_NO_SYMLINKS | VJ_RESOLVE_NO_MAGICLINKS};
	int fd = (int)syscall(VJ_SYS_openat2, dir, path, &how, sizeof how);

	return fd < 0 ? -errno : fd;
}

static int look_at(int dir, const char *path, struct target *t)
{
	struct vj_statx x;

	t->fd = open_exact(dir, path, O_PATH, 0);
	if (t->fd < 0)
		return t->fd;
	memset(&x, 0, sizeof x);
	if (fstat(t->fd, &t->st) != 0 || syscall(VJ_SYS_statx, t->fd, "", VJ_AT_EMPTY_PATH, 0u, &x) != 0) {
		int err = errno;
		vj_close(&t->fd);
		return -err;
	}
	t->is_root = (x.attributes & VJ_STATX_ATTR_MOUNT_ROOT) != 0;
	return 0;
}

static int open_target(const char *path, struct target *t)
{
	return path[0] == '/' ? look_at(AT_FDCWD, path, t) : -EINVAL;
}

static int same(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* Does `path` show `expected` now, as the root of a mount? */
static int verify(const char *path, const struct stat *expected, int read_only)
{
	struct target now;
	struct statvfs fs;
	int err = open_target(path, &now);

	if (err)
		return -VJ_OP_CHANGED;
	if (!same(&now.st, expected) || !now.is_root)
		err = -VJ_OP_CHANGED;
	else if (read_only && (fstatvfs(now.fd, &fs) != 0 || !(fs.f_flag & ST_RDONLY)))
		err = -VJ_OP_CHANGED;
	vj_close(&now.fd);
	return err;
}

static int set_attributes(int mount, uint64_t attributes, uint64_t propagation)
{
	struct vj_mount_attr attr = {.attr_set = attributes, .propagation = propagation};
	unsigned flags = VJ_AT_EMPTY_PATH | VJ_AT_RECURSIVE;

	return syscall(VJ_SYS_mount_setattr, mount, "", flags, &attr, sizeof attr) != 0 ? -errno : 0;
}

/* Clone the tree at `source` and put it on `target`, both by descriptor. */
static int clone_onto(int source, int target, uint64_t attributes)
{
	unsigned flags = VJ_OPEN_TREE_CLONE | VJ_OPEN_TREE_CLOEXEC | VJ_AT_EMPTY_PATH | VJ_AT_RECURSIVE;
	VJ_CLEANUP_FD int tree = (int)syscall(VJ_SYS_open_tree, source, "", flags);

	if (tree < 0)
		return -errno;
	int err = set_attributes(tree, attributes, MS_PRIVATE);
	if (err)
		return err;
	flags = VJ_MOVE_MOUNT_F_EMPTY_PATH | VJ_MOVE_MOUNT_T_EMPTY_PATH;
	return syscall(VJ_SYS_move_mount, tree, "", target, "", flags) != 0 ? -errno : 0;
}

/* Bind onto itself; a name that is a mount already needs no second one. */
static int op_self(const char *path, uint64_t attributes)
{
	struct target t;
	int err = open_target(path, &t);

	if (err)
		return err;
	if (!t.is_root)
		err = clone_onto(t.fd, t.fd, attributes);
	else if (attributes)
		err = set_attributes(t.fd, attributes, 0);
	if (err == 0)
		err = verify(path, &t.st, (attributes & VJ_MOUNT_ATTR_RDONLY) != 0);
	vj_close(&t.fd);
	return err;
}

static int is_cover(const struct covers *c, const struct target *t)
{
	for (int i = 0; i < 2; i++)
		if (c->fd[i] >= 0 && t->is_root && same(&c->st[i], &t->st))
			return 1;
	return 0;
}

/* expected: {dev, ino} the host saw behind the name, NULL = whatever is there. */
static int op_cover(const struct covers *c, const char *path, const uint64_t *expected)
{
	const uint64_t attributes =
		VJ_MOUNT_ATTR_RDONLY | VJ_MOUNT_ATTR_NOSUID | VJ_MOUNT_ATTR_NODEV | VJ_MOUNT_ATTR_NOEXEC;
	struct target t;
	int err = open_target(path, &t);

	if (err)
		return err;
	int which = S_ISDIR(t.st.st_mode) ? 1 : 0;
	if (is_cover(c, &t))
		err = 0; /* covered already */
	else if (expected && ((uint64_t)t.st.st_dev != expected[0] || (uint64_t)t.st.st_ino != expected[1]))
		err = -VJ_OP_CHANGED;
	else if (c->fd[which] < 0)
		err = -VJ_OP_NO_COVER;
	else if ((err = clone_onto(c->fd[which], t.fd, attributes)) == 0)
		err = verify(path, &c->st[which], 1);
	vj_close(&t.fd);
	return err;
}

/* What lies under the mount on `name`: a directory lists the inode number of its own entry, getdents64(2). */
static int entry_is(int dir, const char *name, const uint64_t *expected)
{
	_Alignas(8) char buffer[8192];
	VJ_CLEANUP_FD int list = open_exact(dir, ".", O_RDONLY | O_DIRECTORY, 0);
	struct stat st;
	long n;

	if (list < 0 || fstat(list, &st) != 0 || (uint64_t)st.st_dev != expected[0])
		return 0;
	while ((n = syscall(SYS_getdents64, list, buffer, sizeof buffer)) > 0)
		for (long at = 0; at < n;) {
			const struct dirent64 *entry = (const struct dirent64 *)(const void *)(buffer + at);
			if (!strcmp(entry->d_name, name))
				return entry->d_ino == expected[1];
			at += entry->d_reclen;
		}
	return 0;
}

/* expected: {dev, ino} of the object whose cover goes, NULL = whatever it covers. */
static int op_uncover(const struct covers *c, const char *path, const uint64_t *expected)
{
	char parent[PATH_MAX];
	const char *name = strrchr(path, '/');
	struct target t;

	if (path[0] != '/' || name[1] == 0 || (size_t)(name - path) >= sizeof parent)
		return -VJ_OP_NOT_COVER;
	memcpy(parent, path, (size_t)(name - path));
	parent[name - path] = 0;
	name++;
	/* looked at and taken away in the same directory, whichever name that has meanwhile */
	VJ_CLEANUP_FD int dir = open_exact(AT_FDCWD, parent[0] ? parent : "/", O_PATH | O_DIRECTORY, 0);
	if (dir < 0)
		return dir;
	int err = look_at(dir, name, &t);
	if (err)
		return err;
	int ours = is_cover(c, &t);
	vj_close(&t.fd);
	if (!ours)
		return -VJ_OP_NOT_COVER;
	if (expected && !entry_is(dir, name, expected))
		return -VJ_OP_CHANGED;
	if (fchdir(dir) != 0)
		return -errno;
	err = umount2(name, MNT_DETACH | UMOUNT_NOFOLLOW) != 0 ? -errno : 0;
	if (chdir("/") != 0 && err == 0)
		err = -errno;
	return err;
}

static bool in_network;

/* Become part of the jail's network namespace, which the owner of its mount namespace owns too. */
static int op_network(void)
{
	VJ_CLEANUP_FD int own = open("/proc/1/ns/net", O_RDONLY | O_CLOEXEC);

	if (own < 0)
		return -errno;
	if (setns(own, CLONE_NEWNET) != 0)
		return -errno;
	in_network = true;
	return 0;
}

static int op_sysctl(const char *name, const char *value, size_t len)
{
	VJ_CLEANUP_FD int dir = open_exact(AT_FDCWD, "/proc/sys", O_PATH | O_DIRECTORY, 0);

	/* /proc/sys/net shows the network of whoever looks: without the jail's own it would be the host's. */
	if (!strncmp(name, "net/", 4) && !in_network)
		return -EPERM;
	if (dir < 0)
		return dir;
	VJ_CLEANUP_FD int fd = open_exact(dir, name, O_WRONLY, VJ_RESOLVE_BENEATH);
	if (fd < 0)
		return fd;
	ssize_t n = write(fd, value, len);
	return n < 0 ? -errno : (size_t)n == len ? 0 : -EIO;
}

static int op_inodes(const char *path, const char *count)
{
	struct target t;
	int err = open_target(path, &t);

	if (err)
		return err;
	unsigned flags = VJ_FSPICK_CLOEXEC | VJ_FSPICK_EMPTY_PATH;
	VJ_CLEANUP_FD int fs = t.is_root ? (int)syscall(VJ_SYS_fspick, t.fd, "", flags) : -1;
	if (!t.is_root)
		err = -EINVAL;
	else if (fs < 0 || syscall(VJ_SYS_fsconfig, fs, VJ_FSCONFIG_SET_STRING, "nr_inodes", count, 0) != 0 ||
		 syscall(VJ_SYS_fsconfig, fs, VJ_FSCONFIG_CMD_RECONFIGURE, NULL, NULL, 0) != 0)
		err = -errno;
	vj_close(&t.fd);
	return err;
}

/* ---- the list ---- */

struct op {
	char name[16], path[PATH_MAX], value[256];
	size_t value_len;
	uint64_t number[2];
	uint32_t args; /* elements after the name */
};

static void take(struct mp_reader *r, char *buffer, size_t size)
{
	struct mp_bytes b = mp_read_bytes(r);

	if (b.len >= size || (b.len && memchr(b.ptr, 0, b.len)))
		r->err = EBADMSG;
	else if (b.len)
		memcpy(buffer, b.ptr, b.len);
	buffer[b.len < size ? b.len : 0] = 0;
}

static void read_op(struct mp_reader *r, struct op *op)
{
	uint32_t n = mp_read_array(r);

	op->args = n > 0 ? n - 1 : 0;
	op->path[0] = op->value[0] = 0;
	op->value_len = 0;
	op->number[0] = op->number[1] = 0;
	if (n == 0) {
		r->err = EBADMSG;
		return;
	}
	take(r, op->name, sizeof op->name);
	if (n > 1)
		take(r, op->path, sizeof op->path);
	for (uint32_t i = 2; i < n; i++) {
		enum mp_type type = mp_peek(r);
		if ((type == MP_STR || type == MP_BIN) && i == 2) {
			take(r, op->value, sizeof op->value);
			op->value_len = strlen(op->value);
		} else if (type == MP_BOOL && i == 2) {
			op->number[0] = mp_read_bool(r);
		} else if (type == MP_INT && i < 4) {
			op->number[i - 2] = mp_read_uint(r);
			if (i == 2) /* ["sysctl", name, 16] and ["inodes", path, n] */
				op->value_len = (size_t)snprintf(op->value, sizeof op->value, "%llu",
								 (unsigned long long)op->number[0]);
		} else {
			mp_skip(r);
		}
	}
}

static int apply(const struct op *op, const struct covers *covers)
{
	if (!strcmp(op->name, "private"))
		return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ? -errno : 0;
	if (!strcmp(op->name, "ro")) {
		int err = op_self(op->path, VJ_MOUNT_ATTR_RDONLY);
		return err == -ENOENT && op->number[0] ? 0 : err;
	}
	if (!strcmp(op->name, "pin"))
		return op_self(op->path, 0);
	if (!strcmp(op->name, "cover"))
		return op_cover(covers, op->path, NULL);
	if (!strcmp(op->name, "cover_at"))
		return op->args >= 3 ? op_cover(covers, op->path, op->number) : -EINVAL;
	if (!strcmp(op->name, "same") && op->args >= 3)
		return verify(op->path, &(struct stat){.st_dev = op->number[0], .st_ino = op->number[1]}, 0);
	if (!strcmp(op->name, "uncover"))
		return op_uncover(covers, op->path, op->args >= 3 ? op->number : NULL);
	if (!strcmp(op->name, "network"))
		return op_network();
	if (!strcmp(op->name, "sysctl"))
		return op_sysctl(op->path, op->value, op->value_len);
	if (!strcmp(op->name, "inodes"))
		return op_inodes(op->path, op->value);
	return -VJ_OP_UNKNOWN;
}

static void open_covers(struct covers *c)
{
	static const char *const paths[] = {VJ_COVER_FILE, VJ_COVER_DIR};

	for (int i = 0; i < 2; i++) {
		c->fd[i] = open_exact(AT_FDCWD, paths[i], O_PATH, 0);
		if (c->fd[i] >= 0 && fstat(c->fd[i], &c->st[i]) != 0)
			vj_close(&c->fd[i]);
	}
}

int vj_ops_apply(const uint8_t *ops, size_t len, int32_t *results, size_t capacity, size_t *count)
{
	struct covers covers;
	struct mp_reader r;
	struct op op;

	*count = 0;
	mp_reader_init(&r, ops, len);
	uint32_t n = mp_read_array(&r);
	for (uint32_t i = 0; i < n && !r.err; i++)
		mp_skip(&r);
	if (r.err || r.p != r.end)
		return -EBADMSG;
	if (n > capacity)
		return -E2BIG;
	open_covers(&covers);
	mp_reader_init(&r, ops, len);
	mp_read_array(&r);
	for (uint32_t i = 0; i < n; i++) {
		const uint8_t *start = r.p;
		read_op(&r, &op);
		int err = r.err ? -EINVAL : apply(&op, &covers);
		if (r.err) { /* one bad op does not hide the next ones */
			r.err = 0;
			r.p = start;
			mp_skip(&r);
		}
		results[(*count)++] = -err;
	}
	vj_close(&covers.fd[0]);
	vj_close(&covers.fd[1]);
	return 0;
}
