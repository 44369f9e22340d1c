/* filewrite.c — write_file: a file is replaced as a whole, by rename where that keeps what the file is, else in place. */
#include "fileops.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define LINKS_MAX 40 /* as the kernel */
#define FALLOC_KEEP_SIZE 1 /* fallocate(2) */
#define XATTR_MAX 65536 /* bytes of a value, xattr(7) */
#define ACL "system.posix_acl_access"

struct target {
	struct place at;
	struct stat st; /* valid when exists */
	bool exists;
	int old; /* the existing file, opened to read its attributes, or -1 */
};

/* What the path means: symlinks are followed one by one, so that it is their target that is replaced. */
static int find(struct target *t, const struct file_request *rq)
{
	int e = place_find(&t->at, rq->path, rq->parents);
	for (int links = 0; !e; links++) {
		if (t->at.slash)
			return -EISDIR;
		t->old = file_open(t->at.dir, t->at.name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
		if (t->old >= 0 ? fstat(t->old, &t->st) : fstatat(t->at.dir, t->at.name, &t->st, AT_SYMLINK_NOFOLLOW))
			return errno == ENOENT ? 0 : -errno;
		t->exists = true;
		if (rq->exclusive)
			return -EEXIST;
		if (!S_ISLNK(t->st.st_mode))
			return S_ISREG(t->st.st_mode) ? 0 : S_ISDIR(t->st.st_mode) ? -EISDIR : -E_NOT_REGULAR;
		t->exists = false;
		e = links == LINKS_MAX ? -ELOOP : place_follow(&t->at, rq->parents);
	}
	return e;
}

static bool unchanged(const struct file_request *rq, const struct stat *st)
{
	return st->st_size == rq->old_size && stat_mtime_ns(st) == rq->old_mtime_ns && st->st_ino == rq->old_ino;
}

/* ---- content ---- */

static int content_size(const struct file_request *rq, uint64_t *size)
{
	struct stat st;
	*size = rq->content.len;
	if (!rq->body)
		return rq->has_content ? 0 : -EINVAL;
	if (fstat(rq->body_fd, &st) < 0)
		return -errno;
	*size = (uint64_t)st.st_size;
	return S_ISREG(st.st_mode) ? 0 : -E_NOT_REGULAR;
}

static int copy(int from, int to, uint64_t size)
{
	char buf[16384];
	off_t at = 0;
	bool in_kernel = true;

	while ((uint64_t)at < size) {
		uint64_t left = size - (uint64_t)at;
		if (in_kernel) {
			ssize_t n = sendfile(to, from, &at, left < 1u << 30 ? (size_t)left : 1u << 30);
			if (n > 0 || (n < 0 && errno == EINTR))
				continue;
			if (n < 0 && errno != EINVAL && errno != ENOSYS)
				return -errno;
			in_kernel = false; /* not for these file systems; or the end, which pread will tell */
		}
		ssize_t n = pread(from, buf, left < sizeof buf ? (size_t)left : sizeof buf, at);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO; /* it became shorter */
		int e = write_all(to, buf, (size_t)n);
		if (e)
			return e;
		at += n;
	}
	return 0;
}

static int fill(int fd, const struct file_request *rq, uint64_t size)
{
	return rq->body ? copy(rq->body_fd, fd, size) : write_all(fd, rq->content.ptr, rq->content.len);
}

/* ---- by rename ---- */

static void temp_name(char *out, size_t cap, const char *name)
{
	uint32_t bits = 0;
	char tail[] = "vj-......";
	if (syscall(SYS_getrandom, &bits, sizeof bits, 0) != sizeof bits) {
		struct timespec now;
		clock_gettime(CLOCK_MONOTONIC, &now);
		bits = (uint32_t)now.tv_nsec; /* O_EXCL decides; it need not be secret */
	}
	for (int i = 0; i < 6; i++, bits >>= 5)
		tail[3 + i] = "abcdefghijklmnopqrstuvwxyz234567"[bits & 31];
	if (strlen(name) > NAME_MAX - sizeof tail - 1)
		name = "";
	snprintf(out, cap, ".%s%s%s", name, *name ? "." : "", tail);
}

/* User attributes and the access list; a list that the directory's default gave to the new file and that the old one
 * did not have would let others in. What cannot be copied is left out. */
static void keep_xattrs(int from, int to)
{
	char names[4096], value[XATTR_MAX];
	ssize_t n = from < 0 ? -1 : flistxattr(from, names, sizeof names);
	bool acl = false;

	for (const char *p = names; n > 0 && p < names + n; p += strlen(p) + 1) {
		bool is_acl = strcmp(p, ACL) == 0;
		if (!is_acl && strncmp(p, "user.", 5) != 0)
			continue;
		ssize_t len = fgetxattr(from, p, value, sizeof value);
		if (len >= 0 && fsetxattr(to, p, value, (size_t)len, 0) == 0)
			acl |= is_acl;
	}
	if (!acl)
		fremovexattr(to, ACL);
}

/* Group, attributes and mode of a new file: those of the file that it replaces, and what the request says. */
static int dress(int fd, const struct file_request *rq, const struct target *t)
{
	struct stat st;
	if (t->exists) {
		if (fstat(fd, &st) < 0)
			return -errno;
		if (st.st_gid != t->st.st_gid && fchown(fd, (uid_t)-1, t->st.st_gid) < 0)
			return -EPERM;
		keep_xattrs(t->old, fd);
	}
	if (!t->exists && !rq->has_mode)
		return 0;
	return fchmod(fd, rq->has_mode ? rq->mode : t->st.st_mode & 01777) < 0 ? -errno : 0;
}

static int rename_new(int dir, const char *from, const char *to)
{
	if (syscall(SYS_renameat2, dir, from, dir, to, 1 /* RENAME_NOREPLACE */) == 0)
		return 0;
	if (errno != EINVAL && errno != ENOSYS)
		return -errno;
	if (linkat(dir, from, dir, to, 0) < 0) /* a file system without the flag: link never replaces */
		return -errno;
	unlinkat(dir, from, 0);
	return 0;
}

static int replace(const struct file_request *rq, struct target *t, uint64_t size, struct stat *done)
{
	char temp[NAME_MAX + 1];
	int dir = t->at.dir, fd = -1, e = 0;
	struct stat now;

	for (int tries = 0; fd < 0; tries++) {
		temp_name(temp, sizeof temp, t->at.name);
		/* Closed to others until it is dressed, unless it is going to be like any new file. */
		fd = openat(dir, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
			    t->exists || rq->has_mode ? 0600 : 0666);
		if (fd < 0 && (errno != EEXIST || tries == 100))
			return -errno;
	}
	e = fill(fd, rq, size);
	if (!e)
		e = dress(fd, rq, t);
	if (!e && rq->fsync && fsync(fd) < 0)
		e = -errno;
	if (!e && fstat(fd, done) < 0)
		e = -errno;
	if (close(fd) < 0 && !e) /* where a network file system tells that there is no space */
		e = -errno;
	if (!e && rq->if_unchanged &&
	    (fstatat(dir, t->at.name, &now, AT_SYMLINK_NOFOLLOW) < 0 || !unchanged(rq, &now)))
		e = -ESTALE;
	if (!e && rq->exclusive)
		e = rename_new(dir, temp, t->at.name);
	else if (!e && renameat(dir, temp, dir, t->at.name) < 0)
		e = -errno;
	if (e) {
		unlinkat(dir, temp, 0);
	} else if (rq->fsync && (fd = file_open(dir, ".", O_RDONLY | O_DIRECTORY)) >= 0) {
		fsync(fd);
		close(fd);
	}
	return e;
}

/* ---- in place ---- */

/* Files that are no storage: what is written there is a command to the kernel, given in the worker's name. */
static bool is_kernel_interface(int fd)
{
	static const uint32_t magic[] = {
		0x9fa0, /* proc */ 0x62656572, /* sysfs */ 0x27e0eb, /* cgroup */ 0x63677270, /* cgroup2 */
		0x73636673, /* securityfs */ 0x64626720, /* debugfs */ 0x74726163, /* tracefs */ 0xcafe4a11, /* bpf */
	};
	struct statfs fs;
	if (fstatfs(fd, &fs) < 0)
		return true;
	for (size_t i = 0; i < sizeof magic / sizeof *magic; i++)
		if ((uint32_t)fs.f_type == magic[i])
			return true;
	return false;
}

static int overwrite_opened(const struct file_request *rq, const struct target *t, int fd, uint64_t size,
			    struct stat *done)
{
	int e = 0;
	if (fstat(fd, done) < 0)
		return -errno;
	if (done->st_dev != t->st.st_dev || done->st_ino != t->st.st_ino)
		return -ESTALE;
	if (is_kernel_interface(fd))
		return -EACCES;
	/* The space first, so that a full disk leaves the old content. */
	if (size > (uint64_t)done->st_size && syscall(SYS_fallocate, fd, FALLOC_KEEP_SIZE, (off_t)0, (off_t)size) < 0 &&
	    (errno == ENOSPC || errno == EDQUOT || errno == EFBIG)) {
		e = -errno;
		if (ftruncate(fd, done->st_size) < 0) /* gives back what was reserved; no more can be done */
			return e;
		return e;
	}
	e = fill(fd, rq, size);
	if (!e && ftruncate(fd, (off_t)size) < 0)
		e = -errno;
	if (!e && rq->has_mode && fchmod(fd, rq->mode) < 0)
		e = -errno;
	if (!e && rq->fsync && fsync(fd) < 0)
		e = -errno;
	return e ? e : fstat(fd, done) < 0 ? -errno : 0;
}

static int overwrite(const struct file_request *rq, const struct target *t, uint64_t size, struct stat *done)
{
	int fd = file_open(t->at.dir, t->at.name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return fd;
	int e = overwrite_opened(rq, t, fd, size, done);
	return close(fd) < 0 && !e ? -errno : e;
}

/* ---- the call ---- */

/* A rename would take these from the file: its other names, its owner. */
static bool must_stay(const struct stat *st)
{
	return st->st_nlink > 1 || st->st_uid != geteuid();
}

static int write_target(const struct file_request *rq, struct target *t, struct stat *done, bool *atomic)
{
	uint64_t size;
	int e = content_size(rq, &size);
	if (!e)
		e = may_have_size(size);
	if (!e)
		e = find(t, rq);
	if (e)
		return e;
	if (rq->if_unchanged && (!t->exists || !unchanged(rq, &t->st)))
		return -ESTALE;
	if (t->exists && faccessat(t->at.dir, t->at.name, W_OK, 0) < 0)
		return -errno; /* a directory that can be written would not ask the file */
	*atomic = !t->exists || !must_stay(&t->st);
	if (*atomic) {
		e = replace(rq, t, size, done);
		/* A file granted by itself: its directory is closed, or it is a mount point; another's in /tmp. */
		if (!t->exists || (e != -EBUSY && e != -EACCES && e != -EPERM && e != -EROFS))
			return e;
		*atomic = false;
	}
	return overwrite(rq, t, size, done);
}

int file_write(const struct file_request *rq, struct mp_writer *w)
{
	struct target t = {.at.dir = AT_FDCWD, .old = -1};
	struct stat done;
	bool atomic = false;
	int e = write_target(rq, &t, &done, &atomic);

	if (t.old >= 0)
		close(t.old);
	place_free(&t.at);
	if (e)
		return e;
	reply_begin(w, rq, 6);
	mp_write_str(w, "ok");
	mp_write_bool(w, true);
	mp_write_str(w, "atomic");
	mp_write_bool(w, atomic);
	reply_stat(w, &done);
	return 0;
}
