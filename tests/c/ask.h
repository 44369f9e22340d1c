/* ask.h — for the tests of the file calls: ask one thing, look at the reply, look at the directory.
 *
 * Requests are written as JSON, which keeps them readable and runs them through the same codecs as a real call. */
#ifndef VJ_ASK_H
#define VJ_ASK_H

#include "files.h"
#include "json.h"

#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ---- asking ---- */

static struct {
	int err, fd;
	struct mp_bytes content;
	char type[16], error[128];
	int64_t size, mtime_ns;
	uint64_t ino, mode, nlink;
	uint32_t entries;
	bool atomic, says_fd, has_content;
	uint8_t buf[64 * 1024];
	size_t len;
} got;

static void read_reply(void)
{
	struct mp_reader r;
	mp_reader_init(&r, got.buf, got.len);
	bool id = false;
	for (uint32_t n = mp_read_map(&r); n && !r.err; n--) {
		struct mp_bytes k = mp_read_bytes(&r);
		if (mp_is(k, "id"))
			id = mp_read_int(&r) == 7;
		else if (mp_is(k, "errno"))
			got.err = (int)mp_read_int(&r);
		else if (mp_is(k, "error"))
			CHECK_EQ(mp_cstr(mp_read_bytes(&r), got.error, sizeof got.error), 0);
		else if (mp_is(k, "content")) {
			got.content = mp_read_bytes(&r);
			got.has_content = true;
		} else if (mp_is(k, "type"))
			CHECK_EQ(mp_cstr(mp_read_bytes(&r), got.type, sizeof got.type), 0);
		else if (mp_is(k, "size"))
			got.size = mp_read_int(&r);
		else if (mp_is(k, "mtime_ns"))
			got.mtime_ns = mp_read_int(&r);
		else if (mp_is(k, "ino"))
			got.ino = mp_read_uint(&r);
		else if (mp_is(k, "mode"))
			got.mode = mp_read_uint(&r);
		else if (mp_is(k, "nlink"))
			got.nlink = mp_read_uint(&r);
		else if (mp_is(k, "atomic"))
			got.atomic = mp_read_bool(&r);
		else if (mp_is(k, "fd"))
			got.says_fd = mp_read_bool(&r);
		else if (mp_is(k, "entries")) {
			got.entries = mp_read_array(&r);
			for (uint32_t i = 0; i < got.entries; i++)
				mp_skip(&r);
		} else
			mp_skip(&r);
	}
	CHECK(id && !r.err && r.p == r.end);
}

static int ask_request(const struct file_request *rq)
{
	struct mp_writer w;
	if (got.fd > 0)
		close(got.fd);
	memset(&got, 0, offsetof(__typeof__(got), buf));
	mp_writer_init(&w, got.buf, sizeof got.buf);
	int e = files_handle(rq, &w, &got.fd);
	got.len = w.len;
	read_reply();
	CHECK_EQ(got.err, -e);
	CHECK(got.says_fd == (got.fd >= 0));
	return got.err;
}

/* The request's fields as JSON, less the braces and the id; the errno of the reply. */
static inline int ask_body(int body_fd, const char *fields)
{
	static uint8_t msg[1 << 18];
	static char text[1 << 17];
	struct mp_writer w;
	struct file_request rq;
	int n = snprintf(text, sizeof text, "{\"id\":7,%s}", fields);
	mp_writer_init(&w, msg, sizeof msg);
	CHECK_EQ(json_to_msgpack(text, (size_t)n, &w), 0);
	CHECK(file_request_parse(&rq, msg, w.len));
	rq.body_fd = body_fd;
	return ask_request(&rq);
}

__attribute__((format(printf, 1, 2))) static inline int ask(const char *format, ...)
{
	static char fields[1 << 16];
	va_list args;
	va_start(args, format);
	vsnprintf(fields, sizeof fields, format, args);
	va_end(args);
	return ask_body(-1, fields);
}

#define READ(path) ask("\"op\":\"read_file\",\"path\":\"%s\"", path)
#define WRITE(path, content) ask("\"op\":\"write_file\",\"path\":\"%s\",\"content\":\"%s\"", path, content)
#define REMOVE(path, more) ask("\"op\":\"remove\",\"path\":\"%s\"%s", path, more)
#define RECURSIVE ",\"recursive\":true"

/* ---- the host's view ---- */

static inline void put_file(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");
	CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

static inline bool holds(const char *path, const char *text)
{
	char buf[256] = "";
	int fd = open(path, O_RDONLY);
	ssize_t n = fd < 0 ? -1 : read(fd, buf, sizeof buf);
	if (fd >= 0)
		close(fd);
	return n == (ssize_t)strlen(text) && !memcmp(buf, text, (size_t)n);
}

static inline struct stat look(const char *path)
{
	struct stat st = {0};
	CHECK_EQ(lstat(path, &st), 0);
	return st;
}

static inline int count(const char *path)
{
	DIR *d = opendir(path);
	int n = -2; /* . and .. */
	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n;
}

static inline int open_fds(void)
{
	int n = 0;
	for (int fd = 0; fd < 256; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static inline int memfd_of(size_t n, char fill)
{
	int fd = (int)syscall(SYS_memfd_create, "body", 1);
	char *p = malloc(n ? n : 1);
	memset(p, fill, n);
	CHECK(write(fd, p, n) == (ssize_t)n);
	free(p);
	return fd;
}

/* ---- a directory of our own, as an ordinary user ---- */

static char place_name[64];
static int place_fds;

static inline void enter_place(void)
{
	char dir[] = "/tmp/vj-files-XXXXXX";
	uid_t nobody = 65534;
	if (!mkdtemp(dir))
		exit(1);
	if (geteuid() == 0) {
		if (chown(dir, nobody, nobody) || setgroups(0, NULL) || setresgid(nobody, nobody, nobody) ||
		    setresuid(nobody, nobody, nobody))
			exit(1);
		prctl(PR_SET_DUMPABLE, 1);
	}
	umask(022);
	if (chdir(dir) < 0)
		exit(1);
	snprintf(place_name, sizeof place_name, "%s", strrchr(dir, '/') + 1);
	place_fds = open_fds();
}

static inline int leave_place(void)
{
	if (got.fd > 0)
		close(got.fd);
	got.fd = 0;
	CHECK_EQ(open_fds(), place_fds); /* no call keeps a descriptor */
	CHECK_EQ(chdir("/tmp"), 0);
	CHECK_EQ(REMOVE(place_name, RECURSIVE), 0);
	return check_report();
}

#endif
