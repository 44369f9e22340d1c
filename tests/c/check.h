/* check.h — the smallest frame for a test program: a condition that does not hold is printed and counted. */
#ifndef VJ_CHECK_H
#define VJ_CHECK_H

#include <stdio.h>

static int check_failed, check_done;

#define CHECK(condition)                                                                \
	do {                                                                            \
		check_done++;                                                           \
		if (!(condition)) {                                                     \
			check_failed++;                                                 \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
		}                                                                       \
	} while (0)

#define CHECK_EQ(got, want)                                                                                   \
	do {                                                                                                  \
		long long got_ = (long long)(got), want_ = (long long)(want);                                 \
		check_done++;                                                                                 \
		if (got_ != want_) {                                                                          \
			check_failed++;                                                                       \
			fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #got, got_, want_); \
		}                                                                                             \
	} while (0)

static inline int check_report(void)
{
	printf("%d checks, %d failed\n", check_done, check_failed);
	return check_failed ? 1 : 0;
}

#endif
