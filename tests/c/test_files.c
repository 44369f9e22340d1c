/* test_files.c — files.h: what each call does to a real directory, as an ordinary user.
 *
 * Requests are written as JSON, which keeps them readable and runs them through the same codecs as a real call. Where a
 * mount is needed, a user namespace makes it; where there is none, that part is skipped and says so. */
#include "files.h"
#include "json.h"

#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
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
static int ask_body(int body_fd, const char *fields)
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

__attribute__((format(printf, 1, 2))) static int ask(const char *format, ...)
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

/* ---- the host's view ---- */

static void put_file(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");
	CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

static bool holds(const char *path, const char *text)
{
	char buf[256] = "";
	int fd = open(path, O_RDONLY);
	ssize_t n = fd < 0 ? -1 : read(fd, buf, sizeof buf);
	if (fd >= 0)
		close(fd);
	return n == (ssize_t)strlen(text) && !memcmp(buf, text, (size_t)n);
}

static struct stat look(const char *path)
{
	struct stat st = {0};
	CHECK_EQ(lstat(path, &st), 0);
	return st;
}

static int count(const char *path)
{
	DIR *d = opendir(path);
	int n = -2; /* . and .. */
	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n;
}

static int open_fds(void)
{
	return count("/proc/self/fd");
}

static int memfd_of(size_t n, char fill)
{
	int fd = (int)syscall(SYS_memfd_create, "body", 1);
	char *p = malloc(n ? n : 1);
	memset(p, fill, n);
	CHECK(write(fd, p, n) == (ssize_t)n);
	free(p);
	return fd;
}

/* ---- read_file, stat ---- */

static void test_read(void)
{
	put_file("r", "hello\n");
	struct stat st = look("r");
	CHECK_EQ(READ("r"), 0);
	CHECK(got.content.len == 6 && !memcmp(got.content.ptr, "hello\n", 6));
	CHECK(got.size == 6 && got.ino == st.st_ino && got.mode == (st.st_mode & 07777));
	CHECK_EQ(got.mtime_ns, st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"./r\",\"offset\":1,\"limit\":3"), 0);
	CHECK(got.content.len == 3 && !memcmp(got.content.ptr, "ell", 3));
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"r\",\"offset\":100"), 0);
	CHECK(got.has_content && got.content.len == 0);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"r\",\"limit\":0"), 0);
	CHECK(got.has_content && got.content.len == 0);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"r\",\"offset\":18446744073709551615"), EINVAL);
	put_file("empty", "");
	CHECK_EQ(READ("empty"), 0);
	CHECK(got.has_content && got.content.len == 0);

	CHECK_EQ(READ("none"), ENOENT);
	CHECK_EQ(READ("none/x"), ENOENT);
	CHECK_EQ(READ("r/x"), ENOTDIR);
	CHECK_EQ(READ(""), ENOENT);
	CHECK_EQ(READ("."), EISDIR);
	CHECK_EQ(READ("a\\u0000b"), EINVAL);
	CHECK_EQ(ask("\"op\":\"read_file\""), ENOENT);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path_b64\":\"/w==\""), ENOENT);
	char name[5000];
	memset(name, 'n', sizeof name);
	name[300] = 0;
	CHECK_EQ(READ(name), ENAMETOOLONG);
	name[300] = 'n';
	name[4999] = 0;
	CHECK_EQ(READ(name), ENAMETOOLONG);
	put_file("closed", "x");
	chmod("closed", 0);
	CHECK_EQ(READ("closed"), EACCES);
	CHECK_EQ(ask("\"op\":\"nonsense\",\"path\":\"r\""), ENOSYS);
}

static void test_read_large(void)
{
	int fd = open("large", O_RDWR | O_CREAT, 0600);
	CHECK_EQ(ftruncate(fd, FILES_INLINE_MAX), 0);
	CHECK_EQ(READ("large"), 0);
	CHECK(got.fd < 0 && got.content.len == FILES_INLINE_MAX);
	CHECK_EQ(ftruncate(fd, FILES_INLINE_MAX + 1), 0);
	CHECK_EQ(READ("large"), 0);
	CHECK(got.fd >= 0 && !got.has_content && got.size == FILES_INLINE_MAX + 1);
	CHECK_EQ(fcntl(got.fd, F_GETFL) & O_ACCMODE, O_RDONLY);
	CHECK_EQ(fcntl(got.fd, F_GETFD), FD_CLOEXEC);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"large\",\"offset\":10"), 0);
	CHECK(got.fd < 0 && got.content.len == FILES_INLINE_MAX - 9);
	if (ftruncate(fd, (off_t)1 << 40) == 0) {
		CHECK(pwrite(fd, "end", 3, ((off_t)1 << 40) - 3) == 3);
		CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"large\",\"limit\":100"), 0);
		CHECK_EQ(got.content.len, 100);
		CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"large\",\"offset\":1099511627773,\"limit\":1000"), 0);
		CHECK(got.content.len == 3 && !memcmp(got.content.ptr, "end", 3));
		CHECK_EQ(READ("large"), 0);
		CHECK(got.fd >= 0);
	}
	close(fd);
	unlink("large");
}

static void test_read_special(void)
{
	CHECK_EQ(mkfifo("fifo", 0600), 0);
	CHECK_EQ(READ("fifo"), EINVAL);
	CHECK(!strcmp(got.error, "not a regular file"));
	int s = socket(AF_UNIX, SOCK_STREAM, 0);
	struct sockaddr_un addr = {.sun_family = AF_UNIX, .sun_path = "sock"};
	CHECK_EQ(bind(s, (const struct sockaddr *)&addr, sizeof addr), 0);
	CHECK_EQ(READ("sock"), EINVAL);
	close(s);
	CHECK_EQ(READ("/dev/zero"), EINVAL);
	CHECK_EQ(READ("/dev/null"), EINVAL);
	CHECK_EQ(WRITE("fifo", "x"), EINVAL);
	CHECK_EQ(WRITE("sock", "x"), EINVAL);
	CHECK_EQ(WRITE("/dev/null", "x"), EINVAL);

	CHECK_EQ(READ("/proc/self/status"), 0);
	CHECK(got.size == 0 && got.content.len > 100);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"/proc/self/status\",\"limit\":5"), 0);
	CHECK(got.content.len == 5 && !memcmp(got.content.ptr, "Name:", 5));
	if (READ("/proc/kallsyms") == 0 || got.err == EFBIG)
		CHECK(got.err == EFBIG && !got.has_content);
	CHECK_EQ(ask("\"op\":\"read_file\",\"path\":\"/proc/kallsyms\",\"limit\":1000"), 0);
	CHECK_EQ(got.content.len, 1000);

	/* Magic links lead to what no name leads to. */
	int fd = open("r", O_RDONLY);
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	CHECK_EQ(READ(path), ELOOP);
	CHECK_EQ(WRITE(path, "x"), ELOOP);
	CHECK_EQ(READ("/proc/self/cwd/r"), ELOOP);
	CHECK_EQ(WRITE("/proc/self/cwd/r", "x"), ELOOP);
	CHECK_EQ(ask("\"op\":\"remove\",\"path\":\"/proc/self/cwd/r\""), ELOOP);
	CHECK_EQ(READ("/proc/self/exe"), ELOOP);
	CHECK_EQ(READ("/proc/self/root/etc/hostname"), ELOOP);
	CHECK(symlink(path, "planted") == 0);
	CHECK_EQ(READ("planted"), ELOOP);
	CHECK_EQ(WRITE("planted", "x"), ELOOP);
	CHECK(holds("r", "hello\n"));
	close(fd);

	/* The kernel's own files are read, never written in the worker's name. */
	CHECK(WRITE("/proc/self/oom_score_adj", "500") != 0);
	CHECK(WRITE("/proc/self/mem", "500") != 0);
	CHECK(WRITE("/proc/self/new", "500") != 0);
}

static void test_stat(void)
{
	static const struct {
		const char *path, *type;
	} of[] = {{"r", "file"}, {".", "dir"}, {"fifo", "fifo"}, {"sock", "socket"}, {"/dev/null", "char"}, {"to-r", "file"}};
	CHECK_EQ(symlink("r", "to-r"), 0);
	for (size_t i = 0; i < sizeof of / sizeof *of; i++) {
		CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"%s\"", of[i].path), 0);
		CHECK(!strcmp(got.type, of[i].type));
	}
	CHECK(got.size == 6 && got.nlink == 1 && got.ino == look("r").st_ino);
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"to-r\",\"follow\":false"), 0);
	CHECK(!strcmp(got.type, "link") && got.size == 1);
	CHECK_EQ(symlink("loop", "loop"), 0);
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"loop\""), ELOOP);
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"none\""), ENOENT);
}

/* ---- write_file ---- */

static void test_write(void)
{
	mkdir("w", 0755);
	CHECK_EQ(WRITE("w/a", "one"), 0);
	CHECK(got.atomic && got.size == 3 && got.ino == look("w/a").st_ino && holds("w/a", "one"));
	CHECK_EQ(look("w/a").st_mode & 07777, 0644);
	CHECK_EQ(WRITE("w/a", ""), 0);
	CHECK(holds("w/a", ""));
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/a\""), EINVAL);
	CHECK_EQ(WRITE("w", "x"), EISDIR);
	CHECK_EQ(WRITE("w/", "x"), EISDIR);
	CHECK_EQ(WRITE("w/a/", "x"), EISDIR);
	CHECK_EQ(WRITE("w/new/", "x"), EISDIR);
	CHECK_EQ(WRITE("/", "x"), EISDIR);
	CHECK_EQ(WRITE("", "x"), ENOENT);
	CHECK_EQ(WRITE("w/a/b", "x"), ENOTDIR);
	CHECK_EQ(WRITE("w/none/b", "x"), ENOENT);
	CHECK_EQ(count("w"), 1);

	/* Modes */
	chmod("w/a", 0751);
	CHECK_EQ(WRITE("w/a", "two"), 0);
	CHECK_EQ(look("w/a").st_mode & 07777, 0751);
	chmod("w/a", 04755);
	CHECK_EQ(WRITE("w/a", "two"), 0);
	CHECK_EQ(look("w/a").st_mode & 07777, 0755);
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/a\",\"content\":\"x\",\"mode\":%d", 06640), 0);
	CHECK_EQ(look("w/a").st_mode & 07777, 0640);
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/b\",\"content\":\"x\",\"mode\":%d", 07707), 0);
	CHECK_EQ(look("w/b").st_mode & 07777, 01707);
	chmod("w/b", 0200);
	CHECK_EQ(WRITE("w/b", "unreadable"), 0);
	CHECK(got.atomic && (look("w/b").st_mode & 07777) == 0200);
	CHECK_EQ(unlink("w/b"), 0);

	/* A file that is closed stays, though its directory is open. */
	chmod("w/a", 0444);
	CHECK_EQ(WRITE("w/a", "x"), EACCES);
	CHECK(holds("w/a", "x"));
	/* A file that is open is written, though its directory is closed. */
	chmod("w/a", 0644);
	chmod("w", 0555);
	CHECK_EQ(WRITE("w/a", "in place"), 0);
	CHECK(!got.atomic && holds("w/a", "in place") && got.size == 8);
	CHECK_EQ(WRITE("w/a", "short"), 0);
	CHECK(holds("w/a", "short"));
	CHECK_EQ(WRITE("w/c", "x"), EACCES);
	chmod("w", 0755);

	/* Parents */
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/p/q//r/f\",\"content\":\"x\",\"make_parents\":true"), 0);
	CHECK(holds("w/p/q/r/f", "x"));
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/a/q/f\",\"content\":\"x\",\"make_parents\":true"), ENOTDIR);

	/* Long names leave no room for the temporary one's. */
	char path[300] = "w/";
	memset(path + 2, 'l', 255);
	CHECK_EQ(WRITE(path, "x"), 0);
	CHECK_EQ(WRITE(path, "y"), 0);
	CHECK(got.atomic && holds(path, "y"));
	unlink(path);
	CHECK_EQ(count("w"), 2);
}

static void test_write_conditions(void)
{
	put_file("w/if", "old");
	CHECK_EQ(ask("\"op\":\"stat\",\"path\":\"w/if\""), 0);
	long long size = got.size, mtime = got.mtime_ns, ino = (long long)got.ino;
#define IF(s, m, i)                                                                                        \
	ask("\"op\":\"write_file\",\"path\":\"w/if\",\"content\":\"new\",\"if_unchanged\":[%lld,%lld,%lld]", s, m, i)
	CHECK_EQ(IF(size + 1, mtime, ino), ESTALE);
	CHECK_EQ(IF(size, mtime + 1, ino), ESTALE);
	CHECK_EQ(IF(size, mtime, ino + 1), ESTALE);
	CHECK(holds("w/if", "old"));
	CHECK_EQ(IF(size, mtime, ino), 0);
	CHECK(holds("w/if", "new"));
	CHECK_EQ(IF(size, mtime, ino), ESTALE);
	CHECK_EQ(IF((long long)got.size, mtime, ino), ESTALE);
	unlink("w/if");
	CHECK_EQ(IF(size, mtime, ino), ESTALE);
	CHECK(access("w/if", F_OK) < 0);

#define EXCLUSIVE(path) ask("\"op\":\"write_file\",\"path\":\"%s\",\"content\":\"e\",\"exclusive\":true", path)
	CHECK_EQ(EXCLUSIVE("w/ex"), 0);
	CHECK(holds("w/ex", "e"));
	CHECK_EQ(EXCLUSIVE("w/ex"), EEXIST);
	CHECK_EQ(symlink("nowhere", "w/dangling"), 0);
	CHECK_EQ(EXCLUSIVE("w/dangling"), EEXIST);
	unlink("w/ex");
	unlink("w/dangling");
	CHECK_EQ(ask("\"op\":\"write_file\",\"path\":\"w/sync\",\"content\":\"s\",\"fsync\":true"), 0);
	unlink("w/sync");
	CHECK_EQ(count("w"), 2);
}

static void test_write_links(void)
{
	mkdir("l", 0755);
	mkdir("l/sub", 0755);
	put_file("l/sub/target", "old");
	CHECK(symlink("sub/target", "l/one") == 0 && symlink("../l/one", "l/two") == 0);
	CHECK_EQ(WRITE("l/two", "new"), 0);
	CHECK(got.atomic && holds("l/sub/target", "new") && S_ISLNK(look("l/one").st_mode) && S_ISLNK(look("l/two").st_mode));
	CHECK_EQ(symlink("sub/made", "l/dangling"), 0);
	CHECK_EQ(WRITE("l/dangling", "made"), 0);
	CHECK(holds("l/sub/made", "made"));
	CHECK_EQ(symlink("none/made", "l/far"), 0);
	CHECK_EQ(WRITE("l/far", "x"), ENOENT);
	CHECK_EQ(symlink("circle", "l/circle"), 0);
	CHECK_EQ(WRITE("l/circle", "x"), ELOOP);
	CHECK_EQ(symlink("sub", "l/dir"), 0);
	CHECK_EQ(WRITE("l/dir", "x"), EISDIR);
	CHECK_EQ(WRITE("l/dir/through", "x"), 0);
	CHECK(holds("l/sub/through", "x"));
	char cwd[512], text[600];
	CHECK(getcwd(cwd, sizeof cwd));
	snprintf(text, sizeof text, "%s/l/sub/target", cwd);
	CHECK_EQ(symlink(text, "l/absolute"), 0);
	CHECK_EQ(WRITE("l/absolute", "abs"), 0);
	CHECK(holds("l/sub/target", "abs"));

	/* A hard link keeps its other name. */
	CHECK_EQ(link("l/sub/target", "l/hard"), 0);
	CHECK_EQ(WRITE("l/hard", "both"), 0);
	CHECK(!got.atomic && holds("l/sub/target", "both") && look("l/hard").st_nlink == 2);
}

static void test_write_xattr(void)
{
	char value[64];
	put_file("x", "old");
	if (setxattr("x", "user.note", "kept", 4, 0) < 0) {
		printf("no user attributes here: skipped\n");
		return;
	}
	CHECK_EQ(WRITE("x", "new"), 0);
	CHECK(got.atomic && getxattr("x", "user.note", value, sizeof value) == 4 && !memcmp(value, "kept", 4));

	/* A directory's default access list must not open a file that had none. */
	static const uint8_t acl[] = {2, 0, 0, 0, 1, 0, 7, 0, 255, 255, 255, 255, 2, 0, 4, 0, 1, 0, 0, 0, 4, 0, 5, 0, 255,
				      255, 255, 255, 16, 0, 7, 0, 255, 255, 255, 255, 32, 0, 0, 0, 255, 255, 255, 255};
	mkdir("acl", 0755);
	put_file("acl/f", "old");
	chmod("acl/f", 0640);
	if (setxattr("acl", "system.posix_acl_default", acl, sizeof acl, 0) < 0)
		return;
	CHECK_EQ(WRITE("acl/f", "new"), 0);
	CHECK(got.atomic && getxattr("acl/f", "system.posix_acl_access", value, sizeof value) < 0);
	CHECK_EQ(look("acl/f").st_mode & 07777, 0640);
	CHECK_EQ(setxattr("acl/f", "system.posix_acl_access", acl, sizeof acl, 0), 0);
	CHECK_EQ(WRITE("acl/f", "newer"), 0);
	CHECK_EQ(getxattr("acl/f", "system.posix_acl_access", value, sizeof value), sizeof acl);
}

#define BODY "\"op\":\"write_file\",\"path\":\"w/body\",\"body\":true"

static void test_write_body(void)
{
	int fd = memfd_of(300000, 'b');
	CHECK_EQ(ask_body(fd, BODY), 0);
	CHECK(got.atomic && got.size == 300000 && look("w/body").st_size == 300000);
	close(fd);
	fd = memfd_of(0, 0);
	CHECK_EQ(ask_body(fd, BODY), 0);
	CHECK_EQ(look("w/body").st_size, 0);
	close(fd);
	CHECK_EQ(ask_body(-1, BODY), EBADF);
	int pipes[2];
	CHECK_EQ(pipe(pipes), 0);
	CHECK_EQ(ask_body(pipes[0], BODY), EINVAL);
	close(pipes[0]);
	close(pipes[1]);
	unlink("w/body");
	CHECK_EQ(count("w"), 2);
}

/* A write that fails in the middle: here at the limit of a file's size, in test_mounts on a full disk. */
static void test_write_fails(void)
{
	struct rlimit old, small = {.rlim_cur = 4096, .rlim_max = RLIM_INFINITY};
	put_file("w/full", "old");
	int fd = memfd_of(100000, 'f');
	signal(SIGXFSZ, SIG_IGN);
	getrlimit(RLIMIT_FSIZE, &old);
	small.rlim_max = old.rlim_max;
	setrlimit(RLIMIT_FSIZE, &small);
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"w/full\",\"body\":true"), EFBIG);
	CHECK(holds("w/full", "old"));
	CHECK_EQ(count("w"), 3);
	CHECK_EQ(link("w/full", "w/full2"), 0);
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"w/full\",\"body\":true"), EFBIG);
	CHECK(holds("w/full", "old")); /* the space was asked for first */
	setrlimit(RLIMIT_FSIZE, &old);
	close(fd);
	unlink("w/full");
	unlink("w/full2");
}

/* ---- directories ---- */

static void test_list(void)
{
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"l\""), 0);
	CHECK(got.fd < 0 && (int)got.entries == count("l"));
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"r\""), ENOTDIR);
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"none\""), ENOENT);
	mkdir("many", 0755);
	int dir = open("many", O_DIRECTORY);
	char name[300];
	for (int i = 0; i < 5000; i++) {
		snprintf(name, sizeof name, "file-%0*d", i % 200 + 5, i);
		CHECK_EQ(mknodat(dir, name, S_IFREG | 0600, 0), 0);
		if (i == 0) {
			CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"many\""), 0);
			CHECK(got.fd < 0 && got.entries == 1);
		}
	}
	close(dir);
	CHECK_EQ(ask("\"op\":\"list_dir\",\"path\":\"many\""), 0);
	CHECK(got.fd >= 0);
	struct stat st;
	CHECK(fstat(got.fd, &st) == 0 && st.st_size > 500000);
	CHECK_EQ(fcntl(got.fd, 1034 /* F_GET_SEALS */) & 15, 15);
	uint8_t *p = malloc((size_t)st.st_size);
	CHECK(pread(got.fd, p, (size_t)st.st_size, 0) == st.st_size);
	struct mp_reader r;
	mp_reader_init(&r, p, (size_t)st.st_size);
	CHECK(mp_read_map(&r) == 2 && mp_is(mp_read_bytes(&r), "id") && mp_read_int(&r) == 7);
	CHECK(mp_is(mp_read_bytes(&r), "entries") && mp_read_array(&r) == 5000);
	for (int i = 0; i < 5000; i++) {
		CHECK(mp_read_array(&r) == 2 && mp_peek(&r) == MP_BIN && mp_read_bytes(&r).len >= 10);
		CHECK(mp_is(mp_read_bytes(&r), "file"));
	}
	CHECK(!r.err && r.p == r.end);
	free(p);
	CHECK_EQ(ask("\"op\":\"remove\",\"path\":\"many\",\"recursive\":true"), 0);
	CHECK(access("many", F_OK) < 0);
}

#define MAKE(path, more) ask("\"op\":\"make_dir\",\"path\":\"%s\"%s", path, more)

static void test_make_dir(void)
{
	CHECK_EQ(MAKE("d", ""), 0);
	CHECK_EQ(look("d").st_mode, S_IFDIR | 0755);
	CHECK_EQ(MAKE("d", ""), EEXIST);
	CHECK_EQ(MAKE("d", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE("d/", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE(".", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE("/", ",\"exist_ok\":true"), 0);
	CHECK_EQ(MAKE("r", ",\"exist_ok\":true"), EEXIST);
	CHECK_EQ(MAKE("d/e/f", ""), ENOENT);
	CHECK_EQ(MAKE("d/e/f", ",\"parents\":true,\"mode\":448"), 0);
	CHECK(look("d/e").st_mode == (S_IFDIR | 0755) && look("d/e/f").st_mode == (S_IFDIR | 0700));
	CHECK_EQ(MAKE("d/s", ",\"mode\":3583"), 0); /* 06777 */
	CHECK_EQ(look("d/s").st_mode & 07000, 0);
	CHECK_EQ(MAKE("r/x/y", ",\"parents\":true"), ENOTDIR);
	CHECK_EQ(MAKE("", ""), ENOENT);
}

#define REMOVE(path, more) ask("\"op\":\"remove\",\"path\":\"%s\"%s", path, more)
#define RECURSIVE ",\"recursive\":true"

static void test_remove(void)
{
	CHECK_EQ(REMOVE("none", ""), ENOENT);
	CHECK_EQ(REMOVE("none", RECURSIVE), ENOENT);
	CHECK_EQ(REMOVE(".", RECURSIVE), EINVAL);
	CHECK_EQ(REMOVE("d/..", RECURSIVE), EINVAL);
	CHECK_EQ(REMOVE("/", RECURSIVE), EINVAL);
	CHECK_EQ(REMOVE("d", ""), ENOTEMPTY);
	CHECK_EQ(REMOVE("d/s", ""), 0);
	CHECK_EQ(REMOVE("r/", ""), ENOTDIR);
	CHECK_EQ(REMOVE("to-r", ""), 0);
	CHECK(access("r", F_OK) == 0);
	CHECK_EQ(REMOVE("fifo", RECURSIVE), 0);

	/* Links inside are removed, not followed. */
	CHECK(symlink("../../../w", "d/e/f/out") == 0 && symlink("..", "d/e/up") == 0);
	int before = count("w");
	put_file("d/e/f/g", "");
	CHECK_EQ(symlink("d", "to-d"), 0);
	CHECK_EQ(REMOVE("to-d/", RECURSIVE), ENOTDIR);
	CHECK_EQ(REMOVE("to-d", RECURSIVE), 0);
	CHECK(count("d/e/f") == 2);
	CHECK_EQ(REMOVE("d", RECURSIVE), 0);
	CHECK(access("d", F_OK) < 0 && count("w") == before);

	/* Deeper than any path is long, and than there are descriptors. */
	struct rlimit few = {64, 64}, old;
	getrlimit(RLIMIT_NOFILE, &old);
	few.rlim_max = old.rlim_max;
	CHECK_EQ(mkdir("deep", 0755), 0);
	int at = open("deep", O_DIRECTORY);
	for (int i = 0; i < 3000; i++) {
		CHECK(mkdirat(at, "down", 0755) == 0 && mknodat(at, "file", S_IFREG | 0600, 0) == 0);
		int next = openat(at, "down", O_DIRECTORY);
		close(at);
		at = next;
	}
	close(at);
	setrlimit(RLIMIT_NOFILE, &few);
	CHECK_EQ(REMOVE("deep", RECURSIVE), 0);
	setrlimit(RLIMIT_NOFILE, &old);
	CHECK(access("deep", F_OK) < 0);

	/* What cannot be removed is told. */
	mkdir("keep", 0755);
	mkdir("keep/sub", 0755);
	put_file("keep/sub/file", "");
	chmod("keep/sub", 0555);
	CHECK_EQ(REMOVE("keep", RECURSIVE), EACCES);
	chmod("keep/sub", 0755);
	CHECK_EQ(REMOVE("keep", RECURSIVE), 0);
}

/* Another process swaps a directory and a link while it is being removed: nothing behind the link is touched. */
static void test_remove_race(void)
{
	mkdir("safe", 0755);
	put_file("safe/precious", "x");
	mkdir("race", 0755);
	pid_t child = fork();
	if (!child) {
		for (;;) {
			mkdir("race/d", 0755);
			int fd = open("race/d/f", O_CREAT | O_WRONLY, 0600);
			close(fd);
			rename("race/d", "spare");
			if (symlink("../safe", "race/d") < 0)
				rmdir("race");
			unlink("race/d");
			rename("spare", "race/d");
			mkdir("race", 0755);
		}
	}
	struct timespec start, now;
	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		REMOVE("race", RECURSIVE);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < 300);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	CHECK(holds("safe/precious", "x"));
	if (access("race", F_OK) == 0)
		CHECK_EQ(REMOVE("race", RECURSIVE), 0);
}

#define RENAME(from, to, more) ask("\"op\":\"rename\",\"path\":\"%s\",\"to\":\"%s\"%s", from, to, more)

static void test_rename(void)
{
	mkdir("n", 0755);
	put_file("n/a", "a");
	put_file("n/b", "b");
	CHECK_EQ(RENAME("n/a", "n/b", ",\"replace\":false"), EEXIST);
	CHECK_EQ(RENAME("n/a", "n/c", ",\"replace\":false"), 0);
	CHECK_EQ(RENAME("n/c", "n/b", ""), 0);
	CHECK(holds("n/b", "a") && count("n") == 1);
	CHECK_EQ(RENAME("n/none", "n/x", ""), ENOENT);
	CHECK_EQ(RENAME("n/b", "none/x", ""), ENOENT);
	CHECK_EQ(RENAME("n/b/", "n/x", ""), ENOTDIR);
	CHECK_EQ(RENAME("n/b", "n/x/", ""), ENOTDIR);
	CHECK_EQ(RENAME("n/", "m/", ""), 0);
	CHECK(holds("m/b", "a"));
	CHECK_EQ(RENAME("m", "m/sub", ""), EINVAL);
	CHECK_EQ(symlink("b", "m/link"), 0);
	CHECK_EQ(RENAME("m/link", "m/moved", ""), 0);
	CHECK(S_ISLNK(look("m/moved").st_mode) && holds("m/b", "a"));
	CHECK_EQ(ask("\"op\":\"rename\",\"path\":\"m/b\""), ENOENT);
}

/* ---- mounts, in a namespace of our own ---- */

static void put_text_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	if (fd >= 0) {
		if (write(fd, text, strlen(text)) < 0)
			fprintf(stderr, "%s: %s\n", path, strerror(errno));
		close(fd);
	}
}

static int mounts_child(void)
{
	char map[64];
	uid_t uid = geteuid();
	gid_t gid = getegid();
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS) < 0)
		return 77;
	put_text_file("/proc/self/setgroups", "deny");
	snprintf(map, sizeof map, "%u %u 1", uid, uid);
	put_text_file("/proc/self/uid_map", map);
	snprintf(map, sizeof map, "%u %u 1", gid, gid);
	put_text_file("/proc/self/gid_map", map);
	mkdir("disk", 0755);
	if (mount("none", "disk", "tmpfs", 0, "size=64k") < 0)
		return 77;

	check_failed = 0;
	/* A full disk: the old content stays and no temporary file. */
	put_file("disk/f", "old");
	int fd = memfd_of(200000, 'd');
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"disk/f\",\"body\":true"), ENOSPC);
	CHECK(holds("disk/f", "old") && count("disk") == 1);
	CHECK_EQ(link("disk/f", "disk/g"), 0);
	CHECK_EQ(ask_body(fd, "\"op\":\"write_file\",\"path\":\"disk/f\",\"body\":true"), ENOSPC);
	CHECK(holds("disk/f", "old") && look("disk/f").st_blocks <= 8);
	unlink("disk/g");
	close(fd);

	/* A file that is a mount point is written in place; in a read-only directory too; a read-only one is not. */
	put_file("disk/grant", "old");
	put_file("disk/backing", "old");
	CHECK_EQ(mount("disk/backing", "disk/grant", NULL, MS_BIND, NULL), 0);
	CHECK_EQ(WRITE("disk/grant", "through"), 0);
	CHECK(!got.atomic && holds("disk/backing", "through"));
	CHECK_EQ(count("disk"), 3);
	CHECK_EQ(mount(NULL, "disk", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), 0);
	CHECK_EQ(WRITE("disk/grant", "in a closed directory"), 0);
	CHECK(!got.atomic && holds("disk/backing", "in a closed directory"));
	CHECK_EQ(WRITE("disk/f", "x"), EROFS);
	CHECK_EQ(WRITE("disk/new", "x"), EROFS);
	CHECK_EQ(mount(NULL, "disk", NULL, MS_REMOUNT | MS_BIND, NULL), 0);
	CHECK_EQ(mount(NULL, "disk/grant", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY, NULL), 0);
	CHECK_EQ(WRITE("disk/grant", "x"), EROFS);
	CHECK(holds("disk/backing", "in a closed directory"));
	CHECK_EQ(REMOVE("disk/grant", ""), EBUSY);

	/* Removing a mount point is refused before anything in it is gone. */
	CHECK_EQ(REMOVE("disk", RECURSIVE), EBUSY);
	CHECK_EQ(count("disk"), 3);
	return check_failed ? 1 : 0;
}

static void test_mounts(void)
{
	pid_t child = fork();
	if (!child)
		_exit(mounts_child());
	int status = 0;
	waitpid(child, &status, 0);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		printf("no namespaces here: mounts skipped\n");
	else
		CHECK_EQ(status, 0);
}

/* ---- requests ---- */

static void test_parse(void)
{
	struct file_request rq;
	static const uint8_t wrong[] = {0x81, 0xa4, 'p', 'a', 't', 'h', 0x01}, extra[] = {0x80, 0xc0};
	CHECK(!file_request_parse(&rq, wrong, sizeof wrong));
	CHECK(!file_request_parse(&rq, extra, sizeof extra));
	CHECK(!file_request_parse(&rq, "", 0));
	CHECK(file_request_parse(&rq, extra, 1) && rq.op == FILE_NONE && rq.follow && rq.replace && rq.body_fd == -1);
	static const uint8_t nil[] = {0x81, 0xa4, 'p', 'a', 't', 'h', 0xc0};
	CHECK(file_request_parse(&rq, nil, sizeof nil) && rq.path.len == 0);

	/* A reply buffer that is too small is an error, not half a reply. */
	uint8_t buf[128];
	struct mp_writer w;
	int fd;
	rq = (struct file_request){.op = FILE_READ, .path = {(const uint8_t *)"/proc/self/status", 17}, .limit = UINT64_MAX};
	mp_writer_init(&w, buf, sizeof buf);
	CHECK_EQ(files_handle(&rq, &w, &fd), -EMSGSIZE);
	CHECK(!w.overflow && w.len > 0 && fd == -1);
}

int main(void)
{
	char dir[] = "/tmp/vj-files-XXXXXX";
	uid_t nobody = 65534;
	if (!mkdtemp(dir))
		return 1;
	if (geteuid() == 0) {
		if (chown(dir, nobody, nobody) || setgroups(0, NULL) || setresgid(nobody, nobody, nobody) ||
		    setresuid(nobody, nobody, nobody))
			return 1;
		prctl(PR_SET_DUMPABLE, 1);
	}
	umask(022);
	if (chdir(dir) < 0)
		return 1;
	int fds = open_fds();
	test_read();
	test_read_large();
	test_read_special();
	test_stat();
	test_write();
	test_write_conditions();
	test_write_links();
	test_write_xattr();
	test_write_body();
	test_write_fails();
	test_list();
	test_make_dir();
	test_remove();
	test_remove_race();
	test_rename();
	test_mounts();
	test_parse();
	if (got.fd > 0)
		close(got.fd);
	CHECK_EQ(open_fds(), fds); /* no call keeps a descriptor */
	char all[64];
	snprintf(all, sizeof all, "%s", strrchr(dir, '/') + 1);
	CHECK_EQ(chdir("/tmp"), 0);
	CHECK_EQ(REMOVE(all, RECURSIVE), 0);
	return check_report();
}
