/* test_gitignore.c — the compiled matcher by known answers; random ones are compared with git in tests/unit. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "gitignore.h"

static struct gi_set *set_of(const char *const *patterns, bool collapse)
{
	struct gi_set *s;
	CHECK(gi_new(&s) == 0);
	for (; *patterns; patterns++) {
		const char *p = *patterns;
		bool floor = p[0] == '+', negate = p[0] == '!';
		p += floor || negate;
		CHECK_EQ(gi_add(s, p, strlen(p), negate, floor), 0);
	}
	CHECK(gi_compile(s, collapse) == 0);
	return s;
}

static bool masks(const struct gi_set *s, const char *path, unsigned flags)
{
	struct gi_path p = {path, strlen(path), 3, (size_t)(strrchr(path, '/') - path) + 1};
	return gi_match_deep(s, &p, flags);
}

static void known_answers(void)
{
	static const char *const rules[] = {"+.env", "*.key", "!pub.key", "/top", "a/**/z", "+**/.ssh/**", "dir/", "!.env",
					    "//etc/*.pem", "w[0-9]?", NULL};
	static const struct {
		const char *path;
		unsigned flags;
		bool masked;
	} cases[] = {
		{"/w/.env", 0, true},	   {"/w/a/b/.env", 0, true}, {"/w/.env.example", 0, false}, {"/w/x.key", 0, true},
		{"/w/pub.key", 0, false},  {"/w/top", 0, true},	     {"/w/s/top", 0, false},	    {"/w/a/z", 0, true},
		{"/w/a/b/c/z", 0, true},   {"/w/b/z", 0, false},     {"/w/.ssh", GI_DIR, true},	    {"/w/.ssh/id", 0, true},
		{"/w/dir", 0, false},	   {"/w/dir", GI_DIR, true}, {"/w/dir/x", 0, true},	    {"/w/.ENV", 0, false},
		{"/w/.ENV", GI_FOLD, true}, {"/w/W1x", 0, false},    {"/w/w1x", 0, true},	    {"/w/w1", 0, false},
	};
	struct gi_set *s = set_of(rules, true);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		if (masks(s, cases[i].path, cases[i].flags) != cases[i].masked)
			fprintf(stderr, "case %zu: %s\n", i, cases[i].path);
		CHECK(masks(s, cases[i].path, cases[i].flags) == cases[i].masked);
	}
	struct gi_path out = {"/etc/a.pem", 10, 5, 5};
	CHECK(gi_match(s, &out, GI_OUTSIDE) == GI_MATCH);
	struct gi_path anchored = {"/o/top", 6, 3, 3};
	CHECK(gi_match(s, &anchored, GI_OUTSIDE) == GI_NONE); /* an anchored rule says nothing elsewhere */
	CHECK(!gi_names_git(s));
	gi_free(s);
}

static void refused(void)
{
	static const char *const bad[] = {"", "[a", "a\\", "[[:no:]]"};
	struct gi_set *s;
	char long_one[GI_PATTERN_MAX + 2];
	CHECK(gi_new(&s) == 0);
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
		CHECK_EQ(gi_add(s, bad[i], strlen(bad[i]), false, false), -EINVAL);
	CHECK_EQ(gi_add(s, "a\0b", 3, false, false), -EINVAL);
	memset(long_one, 'a', sizeof long_one);
	CHECK_EQ(gi_add(s, long_one, sizeof long_one, false, false), -E2BIG);
	CHECK(gi_compile(s, true) == 0);
	CHECK(!masks(s, "/w/x", 0)); /* an empty set masks nothing */
	gi_free(s);
}

static void in_git_directories(void)
{
	static const char *const rules[] = {"*.pem", ".git/hooks/**", NULL};
	struct gi_set *s = set_of(rules, true);
	CHECK(gi_names_git(s));
	CHECK(masks(s, "/w/.git/hooks", GI_DIR | GI_DOTGIT));
	CHECK(!masks(s, "/w/.git/refs/heads/x.pem", GI_DOTGIT)); /* a branch of that name is no secret */
	CHECK(masks(s, "/w/.GIT/HOOKS", GI_DIR | GI_DOTGIT | GI_FOLD));
	gi_free(s);
}

int main(void)
{
	known_answers();
	refused();
	in_git_directories();
	return check_report();
}
