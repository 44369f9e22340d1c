/* place.c — from a path to an open directory and a name in it; reading directories. */
#include "fileops.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define RESOLVE_NO_MAGICLINKS_ 0x02 /* openat2(2) */

int file_open(int dir, const char *path, int flags)
{
	/* 1: openat2 has worked once; -1: the kernel does not know it. A filter that answers EPERM to what it does not
	 * know is told from a real EPERM by the second attempt. */
	static signed char known;
	const struct {
		uint64_t flags, mode, resolve;
	} how = {(uint64_t)(unsigned)(flags | O_CLOEXEC), 0, RESOLVE_NO_MAGICLINKS_};
	long fd = -1;

	if (known >= 0) {
		fd = syscall(SYS_openat2, dir, path, &how, sizeof how);
		if (fd >= 0)
			known = 1;
		else if (known || (errno != ENOSYS && errno != EPERM))
			return -errno;
		else if (errno == ENOSYS)
			known = -1;
	}
	if (fd < 0)
		fd = openat(dir, path, flags | O_CLOEXEC);
	return fd < 0 ? -errno : (int)fd;
}

static int open_dir(int base, char *path, bool make)
{
	int fd = file_open(base, path, O_PATH | O_DIRECTORY);
	if (fd != -ENOENT || !make)
		return fd;
	fd = *path == '/' ? file_open(base, "/", O_PATH | O_DIRECTORY) : base;
	for (char *at = path, *end; *(at += strspn(at, "/")); at = end) {
		end = at + strcspn(at, "/");
		char kept = *end;
		*end = 0;
		int next = file_open(fd, at, O_PATH | O_DIRECTORY);
		if (next == -ENOENT) {
			if (mkdirat(fd, at, 0777) == 0 || errno == EEXIST)
				next = file_open(fd, at, O_PATH | O_DIRECTORY);
			else
				next = -errno;
		}
		*end = kept;
		if (fd != base)
			close(fd);
		if (next < 0)
			return next;
		fd = next;
	}
	return fd;
}

/* Splits buf; the directory part starts at p->dir, which is replaced. */
static int enter(struct place *p, bool make)
{
	size_t n = strlen(p->buf);
	if (!n)
		return -ENOENT;
	while (n > 1 && p->buf[n - 1] == '/') {
		p->buf[--n] = 0;
		p->slash = true;
	}
	char *last = strrchr(p->buf, '/'), *parent = p->buf;
	if (!last) {
		p->name = p->buf;
		return 0;
	}
	static char root[] = "/", dot[] = ".";
	p->name = last[1] ? last + 1 : dot;
	*last = 0;
	if (last == p->buf)
		parent = root;
	int fd = open_dir(p->dir, parent, make);
	if (fd < 0)
		return fd;
	if (p->dir >= 0)
		close(p->dir);
	p->dir = fd;
	return 0;
}

int place_find(struct place *p, struct mp_bytes path, bool make)
{
	p->dir = AT_FDCWD;
	p->slash = false;
	int e = mp_cstr(path, p->buf, sizeof p->buf);
	return e ? e : enter(p, make);
}

int place_follow(struct place *p, bool make)
{
	char text[VJ_PATH_MAX];
	int fd = file_open(p->dir, p->name, O_PATH); /* ELOOP: a magic link, or a loop */
	if (fd >= 0)
		close(fd);
	else if (fd != -ENOENT)
		return fd;
	ssize_t n = readlinkat(p->dir, p->name, text, sizeof text);
	if (n < 0)
		return -errno;
	if (n == sizeof text)
		return -ENAMETOOLONG;
	memcpy(p->buf, text, (size_t)n);
	p->buf[n] = 0;
	return enter(p, make);
}

void place_free(struct place *p)
{
	if (p->dir >= 0)
		close(p->dir);
}

/* ---- directories ---- */

struct dirent64_ { /* getdents64(2) */
	uint64_t ino;
	int64_t off;
	uint16_t reclen;
	uint8_t type;
	char name[];
};

const char *dirent_next(struct dirent_reader *d, uint8_t *type)
{
	for (;;) {
		if (d->at >= d->len) {
			long n = syscall(SYS_getdents64, d->fd, d->buf, d->size);
			if (n <= 0) {
				d->err = n < 0 ? -errno : 0;
				return NULL;
			}
			d->at = 0;
			d->len = (int)n;
		}
		const struct dirent64_ *e = (const void *)((const char *)d->buf + d->at);
		d->at += e->reclen;
		*type = e->type;
		if (strcmp(e->name, ".") != 0 && strcmp(e->name, "..") != 0)
			return e->name;
	}
}

int may_have_size(uint64_t size)
{
	struct rlimit limit;
	return getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && size > limit.rlim_cur ? -EFBIG : 0;
}

int write_all(int fd, const void *p, size_t n)
{
	for (const char *at = p; n;) {
		ssize_t k = write(fd, at, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return k < 0 ? -errno : -EIO;
		at += k;
		n -= (size_t)k;
	}
	return 0;
}
