/* filetree.c — list_dir, make_dir, remove and rename. */
#include "fileops.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* ---- list_dir ---- */

/* The reply grows in the writer; what passes FILES_INLINE_MAX moves to a memfd, piece by piece. */
struct listing {
	struct mp_writer *w;
	size_t start; /* of the reply in the writer */
	int body;     /* the memfd, or -1 */
	size_t moved; /* bytes in it */
};

static int new_body(void)
{
	enum { CLOEXEC = 1, ALLOW_SEALING = 2, NOEXEC_SEAL = 8 }; /* memfd_create(2); the last one is 6.3 */
	long fd = syscall(SYS_memfd_create, "vectora-jail-list", CLOEXEC | ALLOW_SEALING | NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL)
		fd = syscall(SYS_memfd_create, "vectora-jail-list", CLOEXEC | ALLOW_SEALING);
	return fd < 0 ? -errno : (int)fd;
}

static int move(struct listing *l)
{
	size_t n = l->w->len - l->start;
	if (l->body < 0 && (l->body = new_body()) < 0)
		return l->body;
	if (l->moved + n > VJ_FRAME_MAX || may_have_size(l->moved + n) < 0)
		return -EFBIG;
	int e = write_all(l->body, l->w->buf + l->start, n);
	l->moved += n;
	l->w->len = l->start;
	return e;
}

static const char *entry_type(int dir, const char *name, uint8_t type)
{
	struct stat st;
	if (type) /* DT_x is S_IFx >> 12 */
		return type_name((mode_t)type << 12);
	return fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0 ? "unknown" : type_name(st.st_mode);
}

static int list(struct listing *l, int dir, uint32_t *count)
{
	_Alignas(8) char buf[32768];
	struct dirent_reader d = {.fd = dir, .buf = buf, .size = sizeof buf};
	const char *name;
	uint8_t type;

	for (; (name = dirent_next(&d, &type)); ++*count) {
		size_t len = strlen(name), used = l->w->len - l->start;
		if (used + len + 16 > FILES_INLINE_MAX) {
			int e = move(l);
			if (e)
				return e;
		}
		mp_write_array(l->w, 2);
		mp_write_bin(l->w, name, len);
		mp_write_str(l->w, entry_type(dir, name, type));
		if (l->w->overflow)
			return -EMSGSIZE;
	}
	return d.err;
}

static int seal(struct listing *l, const uint8_t *header, size_t size, size_t at)
{
	enum { ADD_SEALS = 1033, SEAL_ALL = 1 | 2 | 4 | 8 }; /* fcntl(2): seal, shrink, grow, write */
	int e = move(l);
	if (!e && pwrite(l->body, header, size, (off_t)at) != (ssize_t)size)
		e = -EIO;
	if (!e && fcntl(l->body, ADD_SEALS, SEAL_ALL) < 0)
		e = -errno;
	return e;
}

int file_list(const struct file_request *rq, struct mp_writer *w, int *out_fd)
{
	char path[VJ_PATH_MAX];
	struct listing l = {.w = w, .start = w->len, .body = -1};
	uint32_t count = 0;
	int e = mp_cstr(rq->path, path, sizeof path);
	if (e)
		return e;
	int dir = file_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NONBLOCK);
	if (dir < 0)
		return dir;

	reply_begin(w, rq, 1);
	mp_write_str(w, "entries");
	size_t at = w->len - l.start;
	mp_put(w, "\xdd\0\0\0\0", 5); /* an array whose 32-bit size is known at the end */
	e = list(&l, dir, &count);
	close(dir);
	uint8_t header[5] = {0xdd, (uint8_t)(count >> 24), (uint8_t)(count >> 16), (uint8_t)(count >> 8), (uint8_t)count};
	if (!e && l.body < 0) {
		memcpy(w->buf + l.start + at, header, sizeof header);
		return 0;
	}
	if (!e)
		e = seal(&l, header, sizeof header, at);
	if (l.body >= 0)
		*out_fd = l.body; /* closed by the caller on an error */
	if (e)
		return e;
	reply_begin(w, rq, 1);
	mp_write_str(w, "fd");
	mp_write_bool(w, true);
	return 0;
}

/* ---- make_dir ---- */

static int make_dir(const struct file_request *rq, struct place *p)
{
	int e = place_find(p, rq->path, rq->parents);
	if (e)
		return e;
	if (mkdirat(p->dir, p->name, rq->has_mode ? rq->mode : 0777) == 0)
		return 0;
	if (errno != EEXIST || !rq->exist_ok)
		return -errno;
	int fd = file_open(p->dir, p->name, O_PATH | O_DIRECTORY);
	if (fd < 0)
		return -EEXIST;
	close(fd);
	return 0;
}

int file_make_dir(const struct file_request *rq, struct mp_writer *w)
{
	struct place p;
	int e = make_dir(rq, &p);
	place_free(&p);
	if (!e)
		reply_begin(w, rq, 0);
	return e;
}

/* ---- remove ---- */

#define REMOVE_DEPTH 20    /* directories open at a time; what lies deeper is moved up first */
#define REMOVE_SECONDS 30  /* somebody may fill the tree as fast as we empty it */

struct removal {
	int top;
	unsigned names;
	uint64_t removed; /* so far: a pass that removes nothing is the last */
	time_t until;
};

static bool late(const struct removal *r)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec >= r->until;
}

/* Move a directory that lies too deep into the top one, where the next pass finds it. */
static int move_up(struct removal *r, int dir, const char *name)
{
	char up[32];
	for (int tries = 0; tries < 1000; tries++) {
		snprintf(up, sizeof up, ".vj-remove-%u", r->names++);
		if (renameat(dir, name, r->top, up) == 0)
			return 0;
		if (errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR)
			return -errno;
	}
	return -ENOTEMPTY;
}

/* unlinkat; 0 also when it is gone. */
static int take_away(struct removal *r, int dir, const char *name, int flag)
{
	if (unlinkat(dir, name, flag) == 0) {
		r->removed++;
		return 0;
	}
	return errno == ENOENT ? 0 : -errno;
}

static int clear(struct removal *r, int dir, int depth);

/* One entry of a directory; whoever exchanges it for something else meanwhile only gets it removed later or not. */
static int remove_entry(struct removal *r, int dir, const char *name, bool is_dir, int depth)
{
	int e = is_dir ? -EISDIR : take_away(r, dir, name, 0);
	if (e != -EISDIR)
		return e;
	e = take_away(r, dir, name, AT_REMOVEDIR);
	if (e != -ENOTEMPTY && e != -EEXIST)
		return e == -ENOTDIR ? 0 : e;
	if (depth == REMOVE_DEPTH) {
		e = move_up(r, dir, name);
		r->removed += !e;
		return e;
	}
	int sub = file_open(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
	if (sub < 0)
		return sub == -ENOENT || sub == -ENOTDIR || sub == -ELOOP ? 0 : sub;
	e = clear(r, sub, depth + 1);
	close(sub);
	if (!e)
		e = take_away(r, dir, name, AT_REMOVEDIR);
	return e == -ENOTEMPTY || e == -EEXIST || e == -ENOTDIR ? 0 : e;
}

static int clear(struct removal *r, int dir, int depth)
{
	_Alignas(8) char buf[2048];
	struct dirent_reader d = {.fd = dir, .buf = buf, .size = sizeof buf};
	const char *name;
	uint8_t type;

	while ((name = dirent_next(&d, &type))) {
		int e = late(r) ? -ETIMEDOUT : remove_entry(r, dir, name, type == S_IFDIR >> 12, depth);
		if (e)
			return e;
	}
	return d.err;
}

/* rmdir comes first in every pass: a mount point is refused (EBUSY) before anything in it is lost. */
static int remove_tree(const struct place *p)
{
	struct removal r = {.top = -1};
	struct timespec now;
	uint64_t before;
	int e;

	clock_gettime(CLOCK_MONOTONIC, &now);
	r.until = now.tv_sec + REMOVE_SECONDS;
	do {
		if (unlinkat(p->dir, p->name, AT_REMOVEDIR) == 0)
			return 0;
		if (errno != ENOTEMPTY && errno != EEXIST)
			return r.removed && errno == ENOENT ? 0 : -errno;
		before = r.removed;
		r.top = file_open(p->dir, p->name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
		if (r.top < 0)
			return r.top;
		e = clear(&r, r.top, 0);
		close(r.top);
	} while (!e && r.removed > before);
	return e ? e : -ENOTEMPTY;
}

static int remove_place(const struct file_request *rq, struct place *p)
{
	int e = place_find(p, rq->path, false);
	if (e)
		return e;
	if (strcmp(p->name, ".") == 0 || strcmp(p->name, "..") == 0)
		return -EINVAL;
	if (!p->slash) {
		if (unlinkat(p->dir, p->name, 0) == 0)
			return 0;
		if (errno != EISDIR)
			return -errno;
	}
	if (rq->recursive)
		return remove_tree(p);
	return unlinkat(p->dir, p->name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

int file_remove(const struct file_request *rq, struct mp_writer *w)
{
	struct place p;
	int e = remove_place(rq, &p);
	place_free(&p);
	if (!e)
		reply_begin(w, rq, 0);
	return e;
}

/* ---- rename ---- */

static int rename_place(const struct file_request *rq, const struct place *from, const struct place *to)
{
	struct stat st;
	if (from->slash || to->slash) {
		if (fstatat(from->dir, from->name, &st, AT_SYMLINK_NOFOLLOW) < 0)
			return -errno;
		if (!S_ISDIR(st.st_mode))
			return -ENOTDIR;
	}
	if (!rq->replace) {
		if (syscall(SYS_renameat2, from->dir, from->name, to->dir, to->name, 1 /* RENAME_NOREPLACE */) == 0)
			return 0;
		if (errno != EINVAL && errno != ENOSYS)
			return -errno;
		/* A file system without the flag: a look before must do. */
		if (fstatat(to->dir, to->name, &st, AT_SYMLINK_NOFOLLOW) == 0)
			return -EEXIST;
	}
	return renameat(from->dir, from->name, to->dir, to->name) < 0 ? -errno : 0;
}

int file_rename(const struct file_request *rq, struct mp_writer *w)
{
	struct place from, to = {.dir = AT_FDCWD};
	int e = place_find(&from, rq->path, false);
	if (!e)
		e = place_find(&to, rq->to, rq->parents);
	if (!e)
		e = rename_place(rq, &from, &to);
	place_free(&from);
	place_free(&to);
	if (!e)
		reply_begin(w, rq, 0);
	return e;
}
