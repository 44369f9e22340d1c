/* measure.c — what one process uses, as /proc tells it, and what file systems hold; 0 for what cannot be read.
 *
 * Sources: proc(5) status, smaps_rollup, stat, io; `proc` is a descriptor of /proc.
 */
#include "worker.h"

#include "compat.h"
#include "rawsys.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#define PLACES 4
#define TMPFS_MAGIC_NUMBER 0x01021994
#define USER_HZ 100 /* the unit of /proc/N/stat on both architectures */

static struct {
	const char *at[PLACES];
	unsigned n;
} private; /* file systems of the jail whose content is memory */

/* Reads a file of a process; the text's length, 0 when it cannot be read. */
static size_t read_of(int proc, pid_t pid, const char *file, char *text, size_t cap)
{
	char name[40], *p = name + 12;
	size_t n = strlen(file) + 1;
	if (n > sizeof name - 12)
		return 0;
	memcpy(p, file, n);
	for (pid_t v = pid; v && p > name; v /= 10)
		*--p = (char)('0' + v % 10);
	long fd = raw4(SYS_openat, proc, p, O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return 0;
	long got = raw3(SYS_read, fd, text, cap - 1);
	raw1(SYS_close, fd);
	text[got > 0 ? got : 0] = 0;
	return got > 0 ? (size_t)got : 0;
}

/* The number behind a name such as "\nRssAnon:", 0 when it is not there. */
uint64_t text_field(const char *text, const char *name)
{
	const char *p = strstr(text, name);
	uint64_t v = 0;
	if (!p)
		return 0;
	for (p += strlen(name); *p == ' ' || *p == '\t'; p++)
		continue;
	for (; *p >= '0' && *p <= '9'; p++)
		v = v * 10 + (uint64_t)(*p - '0');
	return v;
}

uint64_t process_resident(int proc, pid_t pid, unsigned *threads)
{
	char text[4096];
	if (!read_of(proc, pid, "/status", text, sizeof text))
		return 0;
	if (threads)
		*threads = (unsigned)text_field(text, "\nThreads:");
	return (text_field(text, "\nRssAnon:") + text_field(text, "\nRssShmem:")) * 1024;
}

uint64_t process_share(int proc, pid_t pid)
{
	char text[2048];
	if (!read_of(proc, pid, "/smaps_rollup", text, sizeof text)) /* not dumpable: the plain number */
		return process_resident(proc, pid, NULL);
	return (text_field(text, "\nPss_Anon:") + text_field(text, "\nPss_Shmem:")) * 1024;
}

/* The sum of the fields first..last of /proc/N/stat, numbered from 1 as in proc(5). */
static uint64_t stat_fields(int proc, pid_t pid, int first, int last)
{
	char text[1024];
	uint64_t sum = 0;
	const char *p = read_of(proc, pid, "/stat", text, sizeof text) ? strrchr(text, ')') : NULL;

	for (int k = 3; p && k <= last; k++) { /* the third is the first behind the name */
		p = strchr(p + 1, ' ');
		if (!p || k < first)
			continue;
		uint64_t v = 0;
		for (const char *d = p + 1; *d >= '0' && *d <= '9'; d++)
			v = v * 10 + (uint64_t)(*d - '0');
		sum += v;
	}
	return sum;
}

uint64_t process_cpu_us(int proc, pid_t pid)
{
	return stat_fields(proc, pid, 14, 17) * (1000000 / USER_HZ); /* utime, stime, cutime, cstime */
}

uint64_t process_started_ns(int proc, pid_t pid)
{
	return stat_fields(proc, pid, 22, 22) * (1000000000 / USER_HZ);
}

uint64_t process_written(int proc, pid_t pid)
{
	char text[512];
	return read_of(proc, pid, "/io", text, sizeof text) ? text_field(text, "\nwrite_bytes:") : 0;
}

/* Memory in memfds: it is in no process's resident size until it is mapped. */
uint64_t process_memfds(int proc, pid_t pid, struct inodes *seen)
{
	static _Alignas(8) char buf[4096];
	char name[40] = {0}, *p = name + 12, link[16];
	uint64_t sum = 0;
	long n;

	memcpy(p, "/fd", 4);
	for (pid_t v = pid; v && p > name; v /= 10)
		*--p = (char)('0' + v % 10);
	long dir = raw4(SYS_openat, proc, p, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
	if (dir < 0)
		return 0;
	while ((n = raw3(SYS_getdents64, dir, buf, sizeof buf)) > 0)
		for (long at = 0; at < n;) {
			const struct vj_dirent64 *d = (const void *)(buf + at);
			struct stat st;
			at += d->reclen;
			if (d->name[0] == '.' || raw4(SYS_readlinkat, dir, d->name, link, sizeof link) < 7 ||
			    memcmp(link, "/memfd:", 7) != 0 || fstatat((int)dir, d->name, &st, 0) < 0)
				continue;
			unsigned i = 0;
			while (i < seen->n && seen->ino[i] != st.st_ino)
				i++;
			if (i < seen->n)
				continue;
			if (seen->n < VJ_INODES_MAX)
				seen->ino[seen->n++] = st.st_ino;
			sum += (uint64_t)st.st_blocks * 512;
		}
	raw1(SYS_close, dir);
	return sum;
}

/* The value behind a name such as "HOME=", NULL when it is not there. */
static const char *value_of(char **env, const char *name)
{
	for (; env && *env; env++)
		if (!strncmp(*env, name, strlen(name)))
			return *env + strlen(name);
	return NULL;
}

/* Bytes in use on the file system of the workspace. */
uint64_t blocks_used(void)
{
	struct statfs fs;
	if (statfs(".", &fs) < 0 || fs.f_blocks < fs.f_bfree)
		return 0;
	return (uint64_t)(fs.f_blocks - fs.f_bfree) * (uint64_t)fs.f_bsize;
}

/* The private file systems that hold memory, found once: nothing is mounted by a command. */
void places_find(void)
{
	const char *const names[PLACES] = {"/tmp", "/var/tmp", "/dev/shm", value_of(worker.env, "HOME=")};
	dev_t devs[PLACES];

	private.n = 0;
	if (!worker.pid1) /* the host's own */
		return;
	for (size_t i = 0; i < PLACES; i++) {
		struct statfs fs;
		struct stat st;
		unsigned k = 0;
		if (!names[i] || statfs(names[i], &fs) < 0 || fs.f_type != TMPFS_MAGIC_NUMBER ||
		    stat(names[i], &st) < 0)
			continue;
		while (k < private.n && devs[k] != st.st_dev)
			k++;
		if (k < private.n)
			continue;
		devs[k] = st.st_dev;
		private.at[private.n++] = names[i];
	}
}

uint64_t places_used(void)
{
	uint64_t sum = 0;

	for (unsigned i = 0; i < private.n; i++) {
		struct statfs fs;
		if (statfs(private.at[i], &fs) == 0)
			sum += (uint64_t)(fs.f_blocks - fs.f_bfree) * (uint64_t)fs.f_bsize;
	}
	return sum;
}
