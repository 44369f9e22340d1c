/* floor.c — what a jailed call costs beside the least that any call can cost, in one run and in turns.
 *
 *   cc -O2 -o floor benchmarks/floor.c && ./floor WORKER ROUNDS PROGRAM...
 *
 * floor   vfork + execve + wait4 in the caller, two pipes read to their end
 * worker  the same two pipes passed to a running worker (no jail around it), one message each way
 * reply   no pipes: the worker makes them and puts the output into its reply
 * crowd   the same as worker, but that worker has 64 idle lanes and ten sleeping commands
 * ping    one message each way that starts nothing
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static int sock, null_fd;
static int alone, crowded; /* the sockets of two workers; `sock` is the one in use */

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static size_t put(uint8_t *p, const char *s) /* a msgpack string of at most 255 bytes */
{
	size_t n = strlen(s);
	p[0] = 0xd9;
	p[1] = (uint8_t)n;
	memcpy(p + 2, s, n);
	return n + 2;
}

static void send_message(const uint8_t *buf, size_t len, const int *fds, int nfds)
{
	struct iovec iov = {(void *)(uintptr_t)buf, len};
	union {
		struct cmsghdr align;
		char buf[CMSG_SPACE(3 * sizeof(int))];
	} control = {0};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	if (nfds) {
		msg.msg_control = control.buf;
		msg.msg_controllen = CMSG_SPACE((size_t)nfds * sizeof(int));
		struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN((size_t)nfds * sizeof(int));
		memcpy(CMSG_DATA(c), fds, (size_t)nfds * sizeof(int));
	}
	if (sendmsg(sock, &msg, MSG_NOSIGNAL) < 0)
		die("sendmsg");
}

static void reply(void)
{
	uint8_t buf[4096];
	ssize_t n = recv(sock, buf, sizeof buf, 0);
	if (n <= 0)
		die("the worker is gone");
	if (memmem(buf, (size_t)n, "\xa5" "error", 6)) {
		fwrite(buf, 1, (size_t)n, stderr);
		exit(1);
	}
}

static int start_worker(const char *path)
{
	int s[2];
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s) < 0)
		die("socketpair");
	if (fork() == 0) {
		dup2(s[1], 3);
		execl(path, path, "--fd", "3", (char *)NULL);
		_exit(127);
	}
	close(s[1]);
	sock = s[0];
	static uint8_t m[65536];
	uint8_t *p = m;
	const char *other = getenv("VJ_HELLO"); /* a file: the hello of a real plan, with its walls */
	if (other) {
		int fd = open(other, O_RDONLY | O_CLOEXEC);
		ssize_t n = fd < 0 ? -1 : read(fd, m, sizeof m);
		if (n <= 0)
			die(other);
		close(fd);
		send_message(m, (size_t)n, NULL, 0);
		reply();
		return sock;
	}
	*p++ = 0x84;
	p += put(p, "op"), p += put(p, "hello"), p += put(p, "id"), *p++ = 1;
	p += put(p, "version"), *p++ = 1, p += put(p, "env"), *p++ = 0x91;
	p += put(p, "PATH=/usr/bin:/bin");
	send_message(m, (size_t)(p - m), NULL, 0);
	reply();
	return sock;
}

static void drain(int fd)
{
	char buf[4096];
	while (read(fd, buf, sizeof buf) > 0)
		continue;
	close(fd);
}

static void run_floor(const char *program)
{
	int o[2], e[2], status;
	char *argv[] = {(char *)(uintptr_t)program, NULL};
	if (pipe2(o, O_CLOEXEC) < 0 || pipe2(e, O_CLOEXEC) < 0)
		die("pipe2");
	pid_t pid = vfork();
	if (pid == 0) {
		dup2(null_fd, 0);
		dup2(o[1], 1);
		dup2(e[1], 2);
		execve(program, argv, environ);
		_exit(127);
	}
	close(o[1]);
	close(e[1]);
	drain(o[0]);
	drain(e[0]);
	if (wait4(pid, &status, 0, NULL) != pid || status)
		die("the program failed");
}

static void run_worker(const char *program)
{
	int o[2], e[2];
	static uint8_t m[512];
	uint8_t *p = m;
	if (pipe2(o, O_CLOEXEC) < 0 || pipe2(e, O_CLOEXEC) < 0)
		die("pipe2");
	*p++ = 0x84;
	p += put(p, "op"), p += put(p, "exec"), p += put(p, "id"), *p++ = 2;
	p += put(p, "timeout_ms"), *p++ = 0xce, *p++ = 0, *p++ = 0, *p++ = 0xea, *p++ = 0x60;
	p += put(p, "command"), *p++ = 0x91, p += put(p, program);
	const int fds[3] = {null_fd, o[1], e[1]};
	send_message(m, (size_t)(p - m), fds, 3);
	close(o[1]);
	close(e[1]);
	reply();
	drain(o[0]);
	drain(e[0]);
}

static void run_reply(const char *program)
{
	static uint8_t m[512];
	uint8_t *p = m;
	sock = alone;
	*p++ = 0x84;
	p += put(p, "op"), p += put(p, "exec"), p += put(p, "id"), *p++ = 2;
	p += put(p, "cap"), *p++ = 0xcd, *p++ = 0x40, *p++ = 0;
	p += put(p, "command"), *p++ = 0x91, p += put(p, program);
	send_message(m, (size_t)(p - m), NULL, 0);
	reply();
}

static void run_alone(const char *program)
{
	sock = alone;
	run_worker(program);
}

static void run_crowded(const char *program)
{
	sock = crowded;
	run_worker(program);
}

/* Lanes nobody uses and commands that do nothing, which a call has to be told apart from. */
static void crowd(void)
{
	for (int i = 0; i < 74; i++) {
		int s[2];
		uint8_t m[128] = {0}, *p = m;
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s) < 0)
			die("socketpair");
		*p++ = 0x82;
		p += put(p, "op"), p += put(p, "lane"), p += put(p, "id"), *p++ = 4;
		send_message(m, (size_t)(p - m), &s[1], 1);
		reply();
		close(s[1]);
		if (i >= 10)
			continue;
		p = m;
		*p++ = 0x83;
		p += put(p, "op"), p += put(p, "exec"), p += put(p, "id"), *p++ = 5;
		p += put(p, "command"), *p++ = 0x92, p += put(p, "/bin/sleep"), p += put(p, "1000");
		const int fds[3] = {null_fd, null_fd, null_fd};
		int main_lane = sock;
		sock = s[0];
		send_message(m, (size_t)(p - m), fds, 3);
		sock = main_lane;
	}
}

static void run_ping(const char *program)
{
	static uint8_t m[64];
	uint8_t *p = m;
	(void)program;
	sock = alone;
	*p++ = 0x82;
	p += put(p, "op"), p += put(p, "ping"), p += put(p, "id"), *p++ = 3;
	send_message(m, (size_t)(p - m), NULL, 0);
	reply();
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(const char *);
	} kinds[] = {{"floor", run_floor}, {"worker", run_alone}, {"reply", run_reply}, {"crowd", run_crowded}, {"ping", run_ping}};
	enum { KINDS = sizeof kinds / sizeof kinds[0] };
	if (argc < 4) {
		fprintf(stderr, "usage: floor WORKER ROUNDS PROGRAM...\n");
		return 2;
	}
	int rounds = atoi(argv[2]);
	null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	alone = start_worker(argv[1]);
	crowded = start_worker(argv[1]);
	crowd();
	double *t = malloc(sizeof *t * KINDS * (size_t)rounds);
	if (rounds < 1 || !t)
		return 2;
	for (int i = 3; i < argc; i++) {
		for (int r = -rounds / 10 - 1; r < rounds; r++)
			for (int k = 0; k < KINDS; k++) { /* in turns, so that a busy moment meets all of them */
				double begin = now_us();
				kinds[k].run(argv[i]);
				if (r >= 0)
					t[k * rounds + r] = now_us() - begin;
			}
		double base = 0;
		for (int k = 0; k < KINDS; k++) {
			double *v = t + k * rounds;
			qsort(v, (size_t)rounds, sizeof *v, by_value);
			if (k == 0)
				base = v[rounds / 2];
			printf("%-28s %-7s p10 %7.1f  p50 %7.1f  p90 %7.1f us  %5.3f of the floor\n", argv[i],
			       kinds[k].name, v[rounds / 10], v[rounds / 2], v[rounds * 9 / 10], v[rounds / 2] / base);
		}
	}
	close(alone);
	close(crowded);
	while (wait(NULL) > 0)
		continue;
	return 0;
}
