/* gitignore.h — a compiled set of gitignore rules, for bytes.
 *
 * Patterns mean what gitignore(5) says: no slash = the name at any depth, a slash = anchored, two stars cross slashes,
 * a trailing slash = directories only, the last rule that matches decides. Two things are ours: a *floor* rule wins
 * over every later negation, and a pattern that begins with two slashes is matched against the absolute path.
 * Matching takes time proportional to pattern times path, whatever the pattern (it may come from a hostile file).
 */
#ifndef VJ_GITIGNORE_H
#define VJ_GITIGNORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GI_PATTERN_MAX 1024 /* bytes of one pattern */
#define GI_RULES_MAX 4096   /* rules of one set */

enum gi_flags {
	GI_DIR = 1,     /* the path is a directory */
	GI_FOLD = 2,    /* its directory ignores case (ASCII letters) */
	GI_OUTSIDE = 4, /* not below the workspace: only rules that match at any depth, or absolute ones */
	GI_DOTGIT = 8,  /* inside a git directory: only rules that name .git themselves */
	GI_FLOOR = 16,  /* only floor rules */
};

enum gi_verdict { GI_NONE = 0, GI_MATCH = 1, GI_NEGATED = 2 };

/* A path as the walk has it: absolute, with the offsets of its workspace-relative part and of its last name. */
struct gi_path {
	const char *abs;
	size_t len, rel, name;
};

struct gi_set;

/* Returns 0 and a new empty set in *out, or -ENOMEM. Free it with gi_free. */
int gi_new(struct gi_set **out);
void gi_free(struct gi_set *s);

/* Add one rule, without a leading '!' (that is `negate`). Returns 0, -EINVAL for an empty or malformed pattern
 * (unclosed bracket, trailing backslash), -E2BIG for one that is too long or too many, -ENOMEM. */
int gi_add(struct gi_set *s, const void *pattern, size_t len, bool negate, bool floor);

/* Finish the set. With `collapse`, "X/" followed by two stars masks the directory X itself where no later negation can re-include
 * something below it (a cover over X is safer than covers over what X holds now). Returns 0 or -ENOMEM. */
int gi_compile(struct gi_set *s, bool collapse);

/* The verdict for this one path; the caller walks from the top and does not look below a matched directory. */
enum gi_verdict gi_match(const struct gi_set *s, const struct gi_path *p, unsigned flags);

/* The same, also for parents: true if the path or any directory above it (below rel) is matched. For tests and small
 * uses: rel must be below the workspace. */
bool gi_match_deep(const struct gi_set *s, const struct gi_path *p, unsigned flags);

/* Is `name` what an editor leaves beside a masked file N (N~, .N.sw?, N.sw? of a dotted N, #N#, N.bak, N.tmp*, N.~1~, .N.*)?
 * Calls `is_masked(ctx, N, len)` for each N that fits until one answers true. Returns that answer. */
bool gi_leaving(const char *name, size_t len, bool (*is_masked)(void *ctx, const char *n, size_t len), void *ctx);

/* Does any rule name .git itself? */
bool gi_names_git(const struct gi_set *s);

/* Call `each` for every rule without a wildcard that has a slash: these name one path, which a symlink may lead to. */
void gi_each_literal(const struct gi_set *s, void (*each)(void *ctx, const char *path, size_t len, bool absolute), void *ctx);

#endif
