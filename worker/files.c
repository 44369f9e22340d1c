/* files.c — the requests and replies of the file calls; read_file and stat. */
#include "fileops.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

static enum file_op op_of(struct mp_bytes b)
{
	static const struct {
		char name[12];
		enum file_op op;
	} ops[] = {
		{"read_file", FILE_READ}, {"write_file", FILE_WRITE}, {"stat", FILE_STAT},     {"list_dir", FILE_LIST},
		{"make_dir", FILE_MAKE_DIR}, {"remove", FILE_REMOVE}, {"rename", FILE_RENAME},
	};
	for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
		if (mp_is(b, ops[i].name))
			return ops[i].op;
	return FILE_NONE;
}

static void read_unchanged(struct file_request *rq, struct mp_reader *r)
{
	if (mp_read_array(r) != 3)
		r->err = EBADMSG;
	rq->old_size = mp_read_int(r);
	rq->old_mtime_ns = mp_read_int(r);
	rq->old_ino = mp_read_uint(r);
	rq->if_unchanged = true;
}

bool file_request_parse(struct file_request *rq, const void *msg, size_t len)
{
	struct mp_reader r;

	*rq = (struct file_request){.follow = true, .replace = true, .limit = UINT64_MAX, .body_fd = -1};
	mp_reader_init(&r, msg, len);
	for (uint32_t n = mp_read_map(&r); n && !r.err; n--) {
		struct mp_bytes k = mp_read_bytes(&r);
		if (mp_peek(&r) == MP_NIL) { /* the same as absent */
			mp_skip(&r);
		} else if (mp_is(k, "op")) {
			rq->op = op_of(mp_read_bytes(&r));
		} else if (mp_is(k, "id")) {
			rq->id = mp_read_int(&r);
			rq->has_id = true;
		} else if (mp_is(k, "path")) {
			rq->path = mp_read_bytes(&r);
		} else if (mp_is(k, "to")) {
			rq->to = mp_read_bytes(&r);
		} else if (mp_is(k, "content")) {
			rq->content = mp_read_bytes(&r);
			rq->has_content = true;
		} else if (mp_is(k, "offset")) {
			rq->offset = mp_read_uint(&r);
		} else if (mp_is(k, "limit")) {
			rq->limit = mp_read_uint(&r);
		} else if (mp_is(k, "mode")) {
			/* The sticky bit and permissions; a file call never makes anything set-user-id or set-group-id. */
			rq->mode = (uint32_t)mp_read_uint(&r) & 01777;
			rq->has_mode = true;
		} else if (mp_is(k, "if_unchanged")) {
			read_unchanged(rq, &r);
		} else if (mp_is(k, "body")) {
			rq->body = mp_read_bool(&r);
		} else if (mp_is(k, "make_parents") || mp_is(k, "parents")) {
			rq->parents = mp_read_bool(&r);
		} else if (mp_is(k, "exist_ok")) {
			rq->exist_ok = mp_read_bool(&r);
		} else if (mp_is(k, "exclusive")) {
			rq->exclusive = mp_read_bool(&r);
		} else if (mp_is(k, "fsync")) {
			rq->fsync = mp_read_bool(&r);
		} else if (mp_is(k, "follow")) {
			rq->follow = mp_read_bool(&r);
		} else if (mp_is(k, "recursive")) {
			rq->recursive = mp_read_bool(&r);
		} else if (mp_is(k, "replace")) {
			rq->replace = mp_read_bool(&r);
		} else {
			mp_skip(&r);
		}
	}
	return !r.err && r.p == r.end;
}

bool files_slow(const struct file_request *rq)
{
	return rq->op == FILE_LIST || (rq->op == FILE_REMOVE && rq->recursive) ||
	       (rq->op == FILE_WRITE && (rq->fsync || rq->body));
}

/* ---- replies ---- */

void reply_begin(struct mp_writer *w, const struct file_request *rq, uint32_t pairs)
{
	mp_write_map(w, 1 + pairs);
	mp_write_str(w, "id");
	if (rq->has_id)
		mp_write_int(w, rq->id);
	else
		mp_write_nil(w);
}

void reply_stat(struct mp_writer *w, const struct stat *st)
{
	mp_write_str(w, "size");
	mp_write_int(w, st->st_size);
	mp_write_str(w, "mtime_ns");
	mp_write_int(w, stat_mtime_ns(st));
	mp_write_str(w, "ino");
	mp_write_uint(w, st->st_ino);
	mp_write_str(w, "mode");
	mp_write_uint(w, st->st_mode & 07777);
}

int64_t stat_mtime_ns(const struct stat *st)
{
	int64_t ns;
	if (__builtin_mul_overflow((int64_t)st->st_mtim.tv_sec, INT64_C(1000000000), &ns) ||
	    __builtin_add_overflow(ns, (int64_t)st->st_mtim.tv_nsec, &ns))
		return st->st_mtim.tv_sec < 0 ? INT64_MIN : INT64_MAX;
	return ns;
}

const char *type_name(mode_t mode)
{
	switch (mode & S_IFMT) {
	case S_IFREG:
		return "file";
	case S_IFDIR:
		return "dir";
	case S_IFLNK:
		return "link";
	case S_IFIFO:
		return "fifo";
	case S_IFSOCK:
		return "socket";
	case S_IFCHR:
		return "char";
	case S_IFBLK:
		return "block";
	default:
		return "unknown";
	}
}

/* ---- read_file ---- */

/* Up to n bytes; fewer at the end of the file. The number or -errno. */
static ssize_t read_at(int fd, uint8_t *p, size_t n, uint64_t offset)
{
	size_t got = 0;
	while (got < n) {
		ssize_t k = pread(fd, p + got, n - got, (off_t)(offset + got));
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return -errno;
		if (k == 0)
			break;
		got += (size_t)k;
	}
	return (ssize_t)got;
}

static int inline_content(int fd, struct mp_writer *w, size_t n, uint64_t offset)
{
	mp_write_str(w, "content");
	uint8_t *p = mp_bin_begin(w, n);
	if (!p)
		return -EMSGSIZE;
	ssize_t got = read_at(fd, p, n, offset);
	if (got < 0)
		return (int)got;
	mp_bin_end(w, (size_t)got);
	return 0;
}

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* A file of /proc that shows this process itself (mem, environ, maps …): commands cannot read the worker, and a file
 * call made in their name must not either. Fails closed where the kernel does not tell the file's place. */
static bool shows_the_worker(int fd)
{
	struct statfs fs;
	char link[40], place[64] = "", own[24];

	if (fstatfs(fd, &fs) == 0 && (uint32_t)fs.f_type != 0x9fa0 /* PROC_SUPER_MAGIC */)
		return false;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	int n = snprintf(own, sizeof own, "/proc/%d/", (int)getpid());
	return readlink(link, place, sizeof place - 1) < 0 || strncmp(place, own, (size_t)n) == 0;
}

static int read_opened(const struct file_request *rq, struct mp_writer *w, int fd, int *out_fd)
{
	struct stat st;
	uint8_t more;

	if (fstat(fd, &st) < 0)
		return -errno;
	if (!S_ISREG(st.st_mode))
		return S_ISDIR(st.st_mode) ? -EISDIR : -E_NOT_REGULAR;
	if (rq->offset > INT64_MAX - FILES_INLINE_MAX)
		return -EINVAL;
	if (!st.st_size) {
		/* Empty, or a file of /proc, which tells its size only by being read. */
		if (shows_the_worker(fd))
			return -EACCES;
		reply_begin(w, rq, 5);
		reply_stat(w, &st);
		size_t n = (size_t)least(rq->limit, FILES_INLINE_MAX), start = w->len;
		int e = inline_content(fd, w, n, rq->offset);
		if (e || w->len - start < n || rq->limit <= n || read_at(fd, &more, 1, rq->offset + n) <= 0)
			return e;
		return -EFBIG;
	}
	uint64_t n = least(rq->limit, rq->offset < (uint64_t)st.st_size ? (uint64_t)st.st_size - rq->offset : 0);
	reply_begin(w, rq, 5);
	reply_stat(w, &st);
	if (n <= FILES_INLINE_MAX)
		return inline_content(fd, w, (size_t)n, rq->offset);
	mp_write_str(w, "fd");
	mp_write_bool(w, true);
	*out_fd = fd;
	return 0;
}

static int file_read(const struct file_request *rq, struct mp_writer *w, int *out_fd)
{
	char path[VJ_PATH_MAX];
	int e = mp_cstr(rq->path, path, sizeof path);
	if (e)
		return e;
	int fd = file_open(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
	if (fd < 0)
		return fd == -ENXIO ? -E_NOT_REGULAR : fd; /* a socket, a device without a driver */
	e = read_opened(rq, w, fd, out_fd);
	if (*out_fd < 0)
		close(fd);
	return e;
}

/* ---- stat ---- */

static int file_stat(const struct file_request *rq, struct mp_writer *w)
{
	char path[VJ_PATH_MAX];
	struct stat st;
	int e = mp_cstr(rq->path, path, sizeof path);
	if (e)
		return e;
	int fd = file_open(AT_FDCWD, path, O_PATH | (rq->follow ? 0 : O_NOFOLLOW));
	if (fd < 0)
		return fd;
	e = fstat(fd, &st) < 0 ? -errno : 0;
	close(fd);
	if (e)
		return e;
	reply_begin(w, rq, 9);
	mp_write_str(w, "type");
	mp_write_str(w, type_name(st.st_mode));
	reply_stat(w, &st);
	mp_write_str(w, "uid");
	mp_write_uint(w, st.st_uid);
	mp_write_str(w, "gid");
	mp_write_uint(w, st.st_gid);
	mp_write_str(w, "nlink");
	mp_write_uint(w, st.st_nlink);
	mp_write_str(w, "dev");
	mp_write_uint(w, st.st_dev);
	return 0;
}

/* ---- any call ---- */

static int run(const struct file_request *rq, struct mp_writer *w, int *out_fd)
{
	switch (rq->op) {
	case FILE_READ:
		return file_read(rq, w, out_fd);
	case FILE_WRITE:
		return file_write(rq, w);
	case FILE_STAT:
		return file_stat(rq, w);
	case FILE_LIST:
		return file_list(rq, w, out_fd);
	case FILE_MAKE_DIR:
		return file_make_dir(rq, w);
	case FILE_REMOVE:
		return file_remove(rq, w);
	case FILE_RENAME:
		return file_rename(rq, w);
	case FILE_NONE:
		break;
	}
	return -ENOSYS;
}

int files_handle(const struct file_request *rq, struct mp_writer *reply, int *out_fd)
{
	size_t start = reply->len;

	*out_fd = -1;
	int e = run(rq, reply, out_fd);
	if (!e && reply->overflow)
		e = -EMSGSIZE;
	if (!e)
		return 0;
	if (*out_fd >= 0)
		close(*out_fd);
	*out_fd = -1;
	reply->len = start;
	reply->overflow = false;
	bool with_path = rq->path.len && rq->path.len < VJ_PATH_MAX;
	int number = e == -E_NOT_REGULAR ? EINVAL : -e;
	reply_begin(reply, rq, with_path ? 3 : 2);
	mp_write_str(reply, "error");
	mp_write_str(reply, e == -E_NOT_REGULAR ? "not a regular file" : strerror(number));
	mp_write_str(reply, "errno");
	mp_write_int(reply, number);
	if (with_path) {
		mp_write_str(reply, "path");
		mp_write_bin(reply, rq->path.ptr, rq->path.len);
	}
	return -number;
}
