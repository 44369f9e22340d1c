/*
 * try_syscall FILTER [--exec PROGRAM ARGS...]
 *
 * Puts the seccomp filter in file FILTER ("-": none) on itself, then makes the calls that it reads from stdin, one a
 * line: "ABI NR ARG0 ... ARG5" in hexadecimal, ABI one of n (native), x (x32), i (int 0x80). Each call is made by a
 * child; its outcome is one line: the result as a signed number ("-1" EPERM ...), or "signal N". With --exec it runs
 * PROGRAM under the filter instead. Callers pass bad pointers and descriptors: a call that gets through does no harm.
 *
 * Static and free of sanitizers: the filter must bind the call, not the run-time around it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECCOMP_SET_MODE_FILTER 1
#ifndef SYS_seccomp
#define SYS_seccomp (sizeof(long) == 8 && sizeof(void *) == 8 ? 317 : 383)
#endif

struct filter_program {
	unsigned short len;
	const void *code;
};

static char program[8 * 4096];

static int install(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	ssize_t n = read(fd, program, sizeof program);
	close(fd);
	if (n <= 0 || n % 8)
		return -EINVAL;
	const struct filter_program prog = {(unsigned short)(n / 8), program};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog))
		return -errno;
	return 0;
}

/* The bare instruction: libc must neither translate errno nor add a check of its own. */
static long bare(long nr, const unsigned long *a)
{
#if defined(__x86_64__)
	long result;
	register unsigned long r10 __asm__("r10") = a[3];
	register unsigned long r8 __asm__("r8") = a[4];
	register unsigned long r9 __asm__("r9") = a[5];
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(nr), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = nr;
	register unsigned long x0 __asm__("x0") = a[0];
	register unsigned long x1 __asm__("x1") = a[1];
	register unsigned long x2 __asm__("x2") = a[2];
	register unsigned long x3 __asm__("x3") = a[3];
	register unsigned long x4 __asm__("x4") = a[4];
	register unsigned long x5 __asm__("x5") = a[5];
	__asm__ volatile("svc 0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory");
	return (long)x0;
#else
#error "no bare call for this architecture"
#endif
}

static long bare_i386(long nr, const unsigned long *a)
{
#if defined(__x86_64__)
	int result;
	__asm__ volatile("int $0x80"
			 : "=a"(result)
			 : "a"((int)nr), "b"((int)a[0]), "c"((int)a[1]), "d"((int)a[2])
			 : "r8", "r9", "r10", "r11", "memory");
	return result;
#else
	(void)nr;
	(void)a;
	return -ENOSYS;
#endif
}

static void attempt(char abi, unsigned long nr, const unsigned long *args)
{
	int out[2];
	if (pipe(out))
		exit(3);
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		alarm(5);
		if (abi == 'x')
			nr |= 0x40000000;
		long result = abi == 'i' ? bare_i386((long)nr, args) : bare((long)nr, args);
		/* Who writes last may be a child that the call itself made; both say the same then. */
		ssize_t n = write(out[1], &result, sizeof result);
		_exit(n == sizeof result ? 0 : 1);
	}
	long result = 0;
	int status = 0;
	close(out[1]);
	ssize_t n = read(out[0], &result, sizeof result);
	close(out[0]);
	waitpid(pid, &status, 0);
	if (n == sizeof result)
		printf("%ld\n", result);
	else
		printf("signal %d\n", WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

int main(int argc, char **argv)
{
	if (argc < 2)
		return 2;
	if (strcmp(argv[1], "-")) {
		int e = install(argv[1]);
		if (e) {
			fprintf(stderr, "filter: %s\n", strerror(-e));
			return 3;
		}
	}
	if (argc > 3 && !strcmp(argv[2], "--exec")) {
		execvp(argv[3], argv + 3);
		fprintf(stderr, "%s: %s\n", argv[3], strerror(errno));
		return 127;
	}
	char line[256];
	while (fgets(line, sizeof line, stdin)) {
		char abi;
		unsigned long nr, a[6] = {0};
		if (sscanf(line, " %c %lx %lx %lx %lx %lx %lx %lx", &abi, &nr, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5]) < 2)
			return 2;
		attempt(abi, nr, a);
	}
	return 0;
}
