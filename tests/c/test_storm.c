/* test_storm.c — files.h under fire: random calls on a small tree that two other processes change all the time.
 *
 * Nothing is known about what each call should say, only that it says it well-formed, in time, keeps no descriptor and
 * never reaches outside: the tree is the root of a namespace, a second tree beside it must stay as it was. */
#include "ask.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define SECONDS 2

static uint32_t seed;

static uint32_t any(uint32_t n)
{
	seed = seed * 1664525 + 1013904223;
	return (uint32_t)(((uint64_t)seed * n) >> 32);
}

static const char *path(void)
{
	static char text[4][64];
	static unsigned turn;
	static const char *const parts[] = {"a", "b", "c", "d", "..", ".", "", "a", "b"};
	char *p = text[turn++ & 3];
	int n = 0;
	for (unsigned i = 0, parts_n = 1 + any(4); i < parts_n; i++)
		n += snprintf(p + n, 64 - (size_t)n, "%s%s", i || !any(6) ? "/" : "", parts[any(9)]);
	return p;
}

/* What a command could do; that it fails is as good. */
static int disturb(void)
{
	const char *p = path(), *q = path();
	switch (any(8)) {
	case 0:
		return symlink(q, p);
	case 1:
		return link(q, p);
	case 2:
		return chmod(p, any(8) << 6 | 0700);
	case 3:
		return mkfifo(p, 0600);
	case 4:
		return mkdir(p, 0755);
	case 5:
		return rename(p, q);
	case 6:
		return truncate(p, any(100000));
	default:
		return unlink(p);
	}
}

static const char *flag(const char *name)
{
	static char text[8][32];
	static unsigned turn;
	char *p = text[turn++ & 7];
	snprintf(p, 32, ",\"%s\":%s", name, any(2) ? "true" : "false");
	return p;
}

static void call(int body)
{
	char fields[512];
	const char *p = path(), *q = path();
	switch (any(8)) {
	case 0:
		snprintf(fields, sizeof fields, "\"op\":\"read_file\",\"path\":\"%s\",\"offset\":%u", p, any(3));
		break;
	case 1:
		snprintf(fields, sizeof fields, "\"op\":\"write_file\",\"path\":\"%s\",\"content\":\"storm\"%s%s", p,
			 flag("make_parents"), flag("exclusive"));
		break;
	case 2:
		snprintf(fields, sizeof fields, "\"op\":\"write_file\",\"path\":\"%s\",\"body\":true%s", p,
			 flag("make_parents"));
		break;
	case 3:
		snprintf(fields, sizeof fields, "\"op\":\"list_dir\",\"path\":\"%s\"", p);
		break;
	case 4:
		snprintf(fields, sizeof fields, "\"op\":\"make_dir\",\"path\":\"%s\"%s%s", p, flag("parents"), flag("exist_ok"));
		break;
	case 5:
		snprintf(fields, sizeof fields, "\"op\":\"remove\",\"path\":\"%s\"%s", p, flag("recursive"));
		break;
	case 6:
		snprintf(fields, sizeof fields, "\"op\":\"rename\",\"path\":\"%s\",\"to\":\"%s\",\"replace\":%s", p, q,
			 any(2) ? "true" : "false");
		break;
	default:
		snprintf(fields, sizeof fields, "\"op\":\"stat\",\"path\":\"%s\",\"follow\":%s", p, any(2) ? "true" : "false");
	}
	ask_body(body, fields);
}

static int storm(void)
{
	pid_t others[2];
	struct timespec now, end;
	unsigned long calls = 0;
	int body = memfd_of(5000, 's'), fds = open_fds();

	for (unsigned i = 0; i < 2; i++)
		if (!(others[i] = fork()))
			for (seed = i + 1;;)
				disturb();
	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += SECONDS;
	seed = (uint32_t)end.tv_nsec;
	printf("seed %u: ", seed);
	do {
		call(body);
		calls++;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
	for (unsigned i = 0; i < 2; i++) {
		kill(others[i], SIGKILL);
		waitpid(others[i], NULL, 0);
	}
	if (got.fd > 0)
		close(got.fd);
	got.fd = 0;
	CHECK_EQ(open_fds(), fds);
	printf("%lu calls\n", calls);
	fflush(stdout);
	return check_failed ? 1 : 0;
}

int main(void)
{
	enter_place();
	mkdir("root", 0755);
	mkdir("safe", 0755);
	put_file("safe/precious", "x");
	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		if (unshare(CLONE_NEWUSER) < 0 || chroot("root") < 0 || chdir("/") < 0)
			_exit(77);
		_exit(storm());
	}
	int status;
	waitpid(child, &status, 0);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
		printf("no namespaces here: skipped\n");
	else
		CHECK_EQ(status, 0);
	CHECK(holds("safe/precious", "x") && count("safe") == 1 && count(".") == 2);
	CHECK_EQ(chmod("root", 0755), 0);
	return leave_place();
}
