/* gitignore.c — see gitignore.h: which rule of a set decides about a path. */
#include "gitignore.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gipattern.h"

struct gi_set {
	struct gi_rule *rules;
	size_t n, cap, words;
	uint64_t *by_first, *by_last; /* 256 rows of `words`: rules whose last name may begin, end with that byte */
	bool names_git;
};

int gi_new(struct gi_set **out)
{
	*out = calloc(1, sizeof **out);
	return *out ? 0 : -ENOMEM;
}

void gi_free(struct gi_set *s)
{
	if (!s)
		return;
	for (size_t i = 0; i < s->n; i++)
		gi_rule_free(&s->rules[i]);
	free(s->rules);
	free(s->by_first);
	free(s->by_last);
	free(s);
}

int gi_add(struct gi_set *s, const void *pattern, size_t len, bool negate, bool floor)
{
	const char *p = pattern;
	struct gi_rule r = {.negate = negate && !floor, .floor = floor};
	if (len > GI_PATTERN_MAX || s->n >= GI_RULES_MAX)
		return -E2BIG;
	if (len == 0 || memchr(p, 0, len))
		return -EINVAL;
	if (len > 2 && p[0] == '/' && p[1] == '/') {
		r.absolute = true;
		p++;
		len--;
	}
	if (len > 1 && p[len - 1] == '/') {
		r.dir_only = true;
		len--;
	}
	r.basename = !memchr(p, '/', len);
	if (p[0] == '/') {
		p++;
		len--;
	}
	r.floating = !r.absolute && !r.basename && len > 3 && memcmp(p, "**/", 3) == 0;
	if (s->n == s->cap) {
		size_t cap = s->cap ? s->cap * 2 : 16;
		struct gi_rule *more = realloc(s->rules, cap * sizeof *more);
		if (!more)
			return -ENOMEM;
		s->rules = more;
		s->cap = cap;
	}
	r.text = malloc(len + 1);
	if (!r.text)
		return -ENOMEM;
	memcpy(r.text, p, len);
	r.text[len] = 0;
	r.len = len;
	int err = gi_rule_finish(&r);
	if (err) {
		gi_rule_free(&r);
		return err;
	}
	r.dead = len == 0;
	s->rules[s->n++] = r;
	return 0;
}

static void filter_byte(uint64_t *table, size_t words, int byte, size_t rule)
{
	for (unsigned c = 0; c < 256; c++)
		if (byte < 0 || gi_fold((uint8_t)c) == gi_fold((uint8_t)byte))
			table[c * words + rule / 64] |= 1ull << (rule % 64);
}

int gi_compile(struct gi_set *s, bool collapse)
{
	size_t last_negation = 0;
	for (size_t i = 0; i < s->n; i++)
		if (s->rules[i].negate)
			last_negation = i + 1;
	for (size_t i = 0; i < s->n; i++) {
		struct gi_rule *r = &s->rules[i];
		s->names_git = s->names_git || r->dotgit;
		if (!collapse || r->negate || (last_negation > i && !r->floor) || r->len < 4 ||
		    memcmp(r->text + r->len - 3, "/**", 3) != 0 || r->text[r->len - 4] == '\\' || r->text[r->len - 4] == '*')
			continue;
		r->len -= 3;
		r->text[r->len] = 0;
		r->dir_only = true;
		int err = gi_rule_finish(r);
		if (err)
			return err;
	}
	s->words = (s->n + 63) / 64;
	s->by_first = calloc(256 * (s->words + 1), sizeof(uint64_t));
	s->by_last = calloc(256 * (s->words + 1), sizeof(uint64_t));
	if (!s->by_first || !s->by_last)
		return -ENOMEM;
	for (size_t i = 0; i < s->n; i++) {
		const struct gi_rule *r = &s->rules[i];
		if (r->dead)
			continue;
		int first = gi_rule_first(r);
		int last = gi_rule_last(r);
		filter_byte(s->by_first, s->words, first, i);
		filter_byte(s->by_last, s->words, last, i);
	}
	return 0;
}

static bool rule_matches(const struct gi_rule *r, const struct gi_path *p, unsigned flags)
{
	size_t from = r->basename ? p->name : r->absolute ? 1 : p->rel;
	if ((r->dir_only && !(flags & GI_DIR)) || ((flags & GI_DOTGIT) && !r->dotgit) ||
	    ((flags & GI_FLOOR) && !r->floor))
		return false;
	if ((flags & GI_OUTSIDE) && !r->basename && !r->floating && !r->absolute)
		return false;
	return gi_rule_text(r, p->abs + from, p->len - from, (flags & GI_FOLD) != 0);
}

enum gi_verdict gi_match(const struct gi_set *s, const struct gi_path *p, unsigned flags)
{
	enum gi_verdict verdict = GI_NONE;
	if (p->name >= p->len)
		return GI_NONE;
	const uint64_t *first = s->by_first + (uint8_t)p->abs[p->name] * s->words;
	const uint64_t *last = s->by_last + (uint8_t)p->abs[p->len - 1] * s->words;
	for (size_t w = s->words; w-- > 0;) {
		for (uint64_t left = first[w] & last[w]; left;) {
			unsigned bit = 63u - (unsigned)__builtin_clzll(left);
			const struct gi_rule *r = &s->rules[w * 64 + bit];
			left &= ~(1ull << bit);
			if ((verdict != GI_NONE && !r->floor) || !rule_matches(r, p, flags))
				continue;
			if (r->floor)
				return GI_MATCH;
			verdict = r->negate ? GI_NEGATED : GI_MATCH;
			if (verdict == GI_MATCH)
				return GI_MATCH;
		}
	}
	return verdict;
}

bool gi_match_deep(const struct gi_set *s, const struct gi_path *p, unsigned flags)
{
	struct gi_path part = *p;
	part.name = p->rel;
	for (size_t i = p->rel; i < p->len; i++) {
		if (p->abs[i] != '/')
			continue;
		part.len = i;
		if (gi_match(s, &part, flags | GI_DIR) == GI_MATCH)
			return true;
		part.name = i + 1;
	}
	part.len = p->len;
	return gi_match(s, &part, flags) == GI_MATCH;
}

bool gi_leaving(const char *name, size_t len, bool (*is_masked)(void *ctx, const char *n, size_t len), void *ctx)
{
	if (len < 2)
		return false;
	if (name[len - 1] == '~') {
		if (is_masked(ctx, name, len - 1))
			return true;
		for (size_t i = len - 2; i > 0; i--) /* numbered backups: N.~12~ */
			if (name[i] == '~' && name[i - 1] == '.' && i > 1 && is_masked(ctx, name, i - 1))
				return true;
	}
	if (len > 2 && name[0] == '#' && name[len - 1] == '#' && is_masked(ctx, name + 1, len - 2))
		return true;
	if (len > 4 && memcmp(name + len - 4, ".bak", 4) == 0 && is_masked(ctx, name, len - 4))
		return true;
	/* vim puts no second dot before a name that has one */
	if (len > 4 && name[0] == '.' && memcmp(name + len - 4, ".sw", 3) == 0 && is_masked(ctx, name, len - 4))
		return true;
	for (size_t i = 1; i + 4 <= len; i++)
		if (name[i] == '.' && memcmp(name + i, ".tmp", 4) == 0 && is_masked(ctx, name, i))
			return true;
	if (name[0] == '.')
		for (size_t i = 2; i < len; i++) /* .N.sw? is one of .N.* */
			if (name[i] == '.' && i + 1 < len && is_masked(ctx, name + 1, i - 1))
				return true;
	return false;
}

bool gi_names_git(const struct gi_set *s)
{
	return s->names_git;
}

void gi_each_literal(const struct gi_set *s, void (*each)(void *ctx, const char *path, size_t len, bool absolute), void *ctx)
{
	for (size_t i = 0; i < s->n; i++) {
		const struct gi_rule *r = &s->rules[i];
		if (!r->negate && !r->basename && !r->dead && r->literal == r->len)
			each(ctx, r->text, r->len, r->absolute);
	}
}
