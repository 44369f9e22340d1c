/* gitignore_driver.c — ask the compiled matcher from a test: one request a line, bytes in hexadecimal.
 *
 *   n            new, empty set            r FLAGS HEX  add a rule (1 negate, 2 floor)   c COLLAPSE  compile
 *   m FLAGS HEX  match below the root "/w", parents included: prints 0 or 1             l HEX HEX  is the first name a leaving of the second?
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gitignore.h"

static size_t unhex(const char *in, char *out)
{
	size_t n = 0;
	unsigned byte;
	for (; sscanf(in, "%2x", &byte) == 1; in += 2)
		out[n++] = (char)byte;
	return n;
}

struct one {
	const char *name;
	size_t len;
};

static bool is_that(void *ctx, const char *n, size_t len)
{
	const struct one *w = ctx;
	return len == w->len && memcmp(n, w->name, len) == 0;
}

int main(void)
{
	static char line[65536], first[32768], second[32768], bytes[32768], path[32768];
	struct gi_set *set = NULL;
	setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
	while (fgets(line, sizeof line, stdin)) {
		unsigned flags = 0;
		size_t len;
		line[strcspn(line, "\n")] = 0;
		first[0] = second[0] = 0;
		switch (line[0]) {
		case 'n':
			gi_free(set);
			if (gi_new(&set))
				return 1;
			break;
		case 'r':
			sscanf(line + 2, "%u %32767s", &flags, first);
			len = unhex(first, bytes);
			printf("%d\n", gi_add(set, bytes, len, flags & 1, (flags & 2) != 0));
			break;
		case 'c':
			sscanf(line + 2, "%u", &flags);
			printf("%d\n", gi_compile(set, flags != 0));
			break;
		case 'm': {
			sscanf(line + 2, "%u %32767s", &flags, first);
			memcpy(path, "/w/", 3);
			len = 3 + unhex(first, path + 3);
			size_t name = len;
			while (path[name - 1] != '/')
				name--;
			struct gi_path p = {path, len, 3, name};
			printf("%d\n", gi_match_deep(set, &p, flags));
			break;
		}
		case 'l': {
			sscanf(line + 2, "%32767s %32767s", first, second);
			len = unhex(first, bytes);
			struct one w = {path, unhex(second, path)};
			printf("%d\n", gi_leaving(bytes, len, is_that, &w));
			break;
		}
		default:
			return 2;
		}
	}
	gi_free(set);
	return 0;
}
