/* pace.c — the least that things cost, measured by a small program on request and in turns with the real thing.
 *
 *   pace floor           for every byte on stdin: vfork + execve + wait4 of argv[2], two pipes read to their end;
 *                        answers with the microseconds it took, a double
 *   pace echo            descriptor 0 is a SOCK_SEQPACKET socket: every message goes back
 *   pace crowd N SECONDS N threads do what `floor` does; prints how many runs a second were made
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;
static const char *program;
static double until_us;

static double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static void drain(int fd)
{
	char buf[4096];
	while (read(fd, buf, sizeof buf) > 0)
		continue;
	close(fd);
}

static void once(int null_fd)
{
	int o[2], e[2], status;
	char *argv[] = {(char *)(size_t)program, NULL};
	if (pipe2(o, O_CLOEXEC) < 0 || pipe2(e, O_CLOEXEC) < 0)
		exit(1);
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
		exit(1);
}

static void *crowd(void *count)
{
	int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	while (now_us() < until_us) {
		once(null_fd);
		++*(long *)count;
	}
	return NULL;
}

int main(int argc, char **argv)
{
	char buf[65536];
	ssize_t n;
	int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (argc == 2 && !strcmp(argv[1], "echo")) {
		while ((n = recv(0, buf, sizeof buf, 0)) > 0)
			if (send(0, buf, (size_t)n, MSG_NOSIGNAL) < 0)
				break;
		return 0;
	}
	if (argc == 3 && !strcmp(argv[1], "floor")) {
		program = argv[2];
		while (read(0, buf, 1) == 1) {
			double begin = now_us();
			once(null_fd);
			double took = now_us() - begin;
			if (write(1, &took, sizeof took) != sizeof took)
				break;
		}
		return 0;
	}
	if (argc == 5 && !strcmp(argv[1], "crowd")) {
		enum { MOST = 64 };
		pthread_t threads[MOST];
		long counts[MOST] = {0}, sum = 0;
		int many = atoi(argv[2]);
		double seconds = atof(argv[3]);
		program = argv[4];
		until_us = now_us() + seconds * 1e6;
		for (int i = 0; i < many && i < MOST; i++)
			pthread_create(&threads[i], NULL, crowd, &counts[i]);
		for (int i = 0; i < many && i < MOST; i++) {
			pthread_join(threads[i], NULL);
			sum += counts[i];
		}
		printf("%f\n", (double)sum / seconds);
		return 0;
	}
	fprintf(stderr, "usage: pace floor PROGRAM | echo | crowd N SECONDS PROGRAM\n");
	return 2;
}
