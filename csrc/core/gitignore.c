/* gitignore.c — see gitignore.h. A rule becomes a row of tokens; a match is the simulation of a small automaton. */
#define _GNU_SOURCE 1 /* memrchr */
#include "gitignore.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum token_kind { T_BYTE, T_ANY, T_SET, T_STAR, T_TREE, T_TREE_SLASH };

struct token {
	uint8_t kind, byte;
	uint16_t set; /* index into the rule's sets */
};

struct byteset {
	uint8_t bits[32];
};

struct rule {
	char *text; /* without leading and trailing slash */
	size_t len, literal, tail; /* bytes before the first special one, and after the last wildcard */
	struct token *tokens; /* of what follows `literal` */
	struct byteset *sets;
	size_t ntokens, nsets;
	bool negate, floor, dir_only, basename, absolute, floating, dotgit, dead;
};

struct gi_set {
	struct rule *rules;
	size_t n, cap, words;
	uint64_t *by_first, *by_last; /* 256 rows of `words`: rules whose last name may begin, end with that byte */
	bool names_git;
};

static bool special(char c)
{
	return c == '*' || c == '?' || c == '[' || c == '\\';
}

static uint8_t fold(uint8_t c)
{
	return c >= 'A' && c <= 'Z' ? (uint8_t)(c + 32) : c;
}

static void set_bit(struct byteset *s, unsigned c)
{
	s->bits[c >> 3] |= (uint8_t)(1u << (c & 7));
}

static bool has_bit(const struct byteset *s, unsigned c)
{
	return ((unsigned)s->bits[c >> 3] >> (c & 7)) & 1u;
}

static bool in_class(const char *name, size_t len, unsigned c)
{
	bool up = c >= 'A' && c <= 'Z', low = c >= 'a' && c <= 'z', dig = c >= '0' && c <= '9';
	bool graph = c > 32 && c < 127;
#define IS(word) (len == sizeof(word) - 1 && memcmp(name, word, len) == 0)
	if (IS("alnum"))
		return up || low || dig;
	if (IS("alpha"))
		return up || low;
	if (IS("blank"))
		return c == ' ' || c == '\t';
	if (IS("cntrl"))
		return c < 32 || c == 127;
	if (IS("digit"))
		return dig;
	if (IS("graph"))
		return graph;
	if (IS("lower"))
		return low;
	if (IS("print"))
		return graph || c == ' ';
	if (IS("punct"))
		return graph && !(up || low || dig);
	if (IS("space"))
		return c == ' ' || (c >= 9 && c <= 13);
	if (IS("upper"))
		return up;
	if (IS("xdigit"))
		return dig || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
#undef IS
	return false;
}

static bool known_class(const char *name, size_t len)
{
	for (unsigned c = 0; c < 128; c++)
		if (in_class(name, len, c))
			return true;
	return false;
}

/* Read one bracket that begins at p[0] == '['. Returns the bytes it takes, 0 if it is malformed. */
static size_t read_bracket(const char *p, size_t len, struct byteset *out)
{
	size_t i = 1;
	bool negated = false, first = true;
	int prev = -1; /* the low end of a range that '-' could continue */
	memset(out, 0, sizeof *out);
	if (i < len && (p[i] == '!' || p[i] == '^')) {
		negated = true;
		i++;
	}
	for (;; first = false) {
		if (i >= len)
			return 0;
		uint8_t c = (uint8_t)p[i];
		if (c == ']' && !first)
			break;
		if (c == '[' && i + 1 < len && p[i + 1] == ':') {
			size_t from = i + 2, to = from;
			while (to < len && p[to] != ']')
				to++;
			if (to >= len)
				return 0;
			if (to > from && p[to - 1] == ':') {
				if (!known_class(p + from, to - 1 - from))
					return 0;
				for (unsigned k = 0; k < 256; k++)
					if (in_class(p + from, to - 1 - from, k))
						set_bit(out, k);
				prev = -1;
				i = to + 1;
				continue;
			}
			set_bit(out, '[');
			prev = '[';
			i++;
			continue;
		}
		if (c == '-' && prev > 0 && i + 1 < len && p[i + 1] != ']') {
			i++;
			if (p[i] == '\\' && ++i >= len)
				return 0;
			for (unsigned k = (unsigned)prev; k <= (uint8_t)p[i]; k++)
				set_bit(out, k);
			prev = -1;
			i++;
			continue;
		}
		if (c == '\\') {
			if (++i >= len)
				return 0;
			c = (uint8_t)p[i];
		}
		set_bit(out, c);
		prev = c;
		i++;
	}
	if (negated)
		for (size_t k = 0; k < sizeof out->bits; k++)
			out->bits[k] = (uint8_t)~out->bits[k];
	out->bits['/' >> 3] &= (uint8_t)~(1u << ('/' & 7));
	return i + 1;
}

/* Turn the part of a rule that holds wildcards into tokens. Two stars cross slashes where they fill a whole path
 * part; git takes the first wildcard of a pattern as the beginning of one, and so do we. */
static int compile_tokens(struct rule *r)
{
	const char *p = r->text + r->literal;
	size_t n = r->len - r->literal;
	r->tokens = calloc(n + 1, sizeof *r->tokens);
	if (!r->tokens)
		return -ENOMEM;
	for (size_t i = 0; i < n;) {
		struct token t = {.kind = T_BYTE, .byte = (uint8_t)p[i]};
		if (p[i] == '*') {
			size_t from = i;
			while (i < n && p[i] == '*')
				i++;
			bool whole = i - from > 1 && (from == 0 || p[from - 1] == '/');
			bool ends = i == n || p[i] == '/' || (p[i] == '\\' && i + 1 < n && p[i + 1] == '/');
			t.kind = whole && ends ? T_TREE : T_STAR;
			if (t.kind == T_TREE && i < n && p[i] == '/') {
				t.kind = T_TREE_SLASH;
				i++;
			}
		} else if (p[i] == '?') {
			t.kind = T_ANY;
			i++;
		} else if (p[i] == '[') {
			struct byteset *more = realloc(r->sets, (r->nsets + 1) * sizeof *more);
			if (!more)
				return -ENOMEM;
			r->sets = more;
			size_t used = read_bracket(p + i, n - i, &r->sets[r->nsets]);
			if (!used)
				return -EINVAL;
			t.kind = T_SET;
			t.set = (uint16_t)r->nsets++;
			i += used;
		} else {
			if (p[i] == '\\') {
				if (++i >= n)
					return -EINVAL;
				t.byte = (uint8_t)p[i];
			}
			i++;
		}
		r->tokens[r->ntokens++] = t;
	}
	return 0;
}

int gi_new(struct gi_set **out)
{
	*out = calloc(1, sizeof **out);
	return *out ? 0 : -ENOMEM;
}

static void rule_free(struct rule *r)
{
	free(r->text);
	free(r->tokens);
	free(r->sets);
	memset(r, 0, sizeof *r);
}

void gi_free(struct gi_set *s)
{
	if (!s)
		return;
	for (size_t i = 0; i < s->n; i++)
		rule_free(&s->rules[i]);
	free(s->rules);
	free(s->by_first);
	free(s->by_last);
	free(s);
}

static bool has_part(const char *p, size_t len, const char *part)
{
	size_t n = strlen(part);
	for (size_t i = 0; i + n <= len; i++) {
		size_t k = 0;
		while (k < n && fold((uint8_t)p[i + k]) == (uint8_t)part[k])
			k++;
		if (k == n && (i == 0 || p[i - 1] == '/') && (i + n == len || p[i + n] == '/'))
			return true;
	}
	return false;
}

/* Fill the derived fields of a rule from its text (no leading, no trailing slash left). */
static int rule_finish(struct rule *r)
{
	while (r->floating && r->len > 3 && memcmp(r->text, "**/", 3) == 0 && !memchr(r->text + 3, '/', r->len - 3)) {
		memmove(r->text, r->text + 3, r->len - 3); /* the same as a name at any depth, and much cheaper */
		r->len -= 3;
		r->basename = true;
		r->floating = false;
	}
	for (r->literal = 0; r->literal < r->len && !special(r->text[r->literal]);)
		r->literal++;
	for (r->tail = 0; r->literal + r->tail < r->len;) {
		char c = r->text[r->len - 1 - r->tail];
		if (special(c) || c == ']')
			break;
		r->tail++;
	}
	/* two stars and a slash may match nothing at all, with their slash */
	char *slash = memrchr(r->text + r->len - r->tail, '/', r->tail);
	if (slash)
		r->tail = (size_t)(r->text + r->len - slash) - 1;
	free(r->tokens);
	free(r->sets);
	r->tokens = NULL;
	r->sets = NULL;
	r->ntokens = r->nsets = 0;
	r->dotgit = has_part(r->text, r->len, ".git");
	return compile_tokens(r);
}

int gi_add(struct gi_set *s, const void *pattern, size_t len, bool negate, bool floor)
{
	const char *p = pattern;
	struct rule r = {.negate = negate && !floor, .floor = floor};
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
		struct rule *more = realloc(s->rules, cap * sizeof *more);
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
	int err = rule_finish(&r);
	if (err) {
		rule_free(&r);
		return err;
	}
	r.dead = len == 0;
	s->rules[s->n++] = r;
	return 0;
}

/* The byte that the last name of every match begins with, or -1 when the pattern leaves it open: a wildcard there, a
 * slash inside brackets, two stars that may also match nothing between two halves of one name. */
static int last_name_begins(const struct rule *r)
{
	size_t from = r->len, star;
	while (from > 0 && r->text[from - 1] != '/')
		from--;
	if (from >= r->len || special(r->text[from]) || (from > 0 && memchr(r->text, '[', from)))
		return -1;
	for (star = from > 0 ? from - 1 : 0; star > 0 && r->text[star - 1] == '*';)
		star--;
	if (from > 0 && star < from - 1 && star > 0 && r->text[star - 1] != '/')
		return -1;
	return (uint8_t)r->text[from];
}

static void filter_byte(uint64_t *table, size_t words, int byte, size_t rule)
{
	for (unsigned c = 0; c < 256; c++)
		if (byte < 0 || fold((uint8_t)c) == fold((uint8_t)byte))
			table[c * words + rule / 64] |= 1ull << (rule % 64);
}

int gi_compile(struct gi_set *s, bool collapse)
{
	size_t last_negation = 0;
	for (size_t i = 0; i < s->n; i++)
		if (s->rules[i].negate)
			last_negation = i + 1;
	for (size_t i = 0; i < s->n; i++) {
		struct rule *r = &s->rules[i];
		s->names_git = s->names_git || r->dotgit;
		if (!collapse || r->negate || (last_negation > i && !r->floor) || r->len < 4 ||
		    memcmp(r->text + r->len - 3, "/**", 3) != 0 || r->text[r->len - 4] == '\\' || r->text[r->len - 4] == '*')
			continue;
		r->len -= 3;
		r->text[r->len] = 0;
		r->dir_only = true;
		int err = rule_finish(r);
		if (err)
			return err;
	}
	s->words = (s->n + 63) / 64;
	s->by_first = calloc(256 * (s->words + 1), sizeof(uint64_t));
	s->by_last = calloc(256 * (s->words + 1), sizeof(uint64_t));
	if (!s->by_first || !s->by_last)
		return -ENOMEM;
	for (size_t i = 0; i < s->n; i++) {
		const struct rule *r = &s->rules[i];
		if (r->dead)
			continue;
		int first = last_name_begins(r);
		char end = r->text[r->len - 1];
		int last = !special(end) && end != ']' ? (uint8_t)end : -1;
		filter_byte(s->by_first, s->words, first, i);
		filter_byte(s->by_last, s->words, last, i);
	}
	return 0;
}

/* Simulate the automaton: `now` holds the token positions that the text read so far can have reached. */
static bool run(const struct rule *r, const char *text, size_t len, bool folded)
{
	uint8_t a[GI_PATTERN_MAX + 1], b[GI_PATTERN_MAX + 1], *now = a, *next = b;
	size_t n = r->ntokens;
	memset(now, 0, n + 1);
	now[0] = 1;
	for (size_t i = 0;; i++) {
		for (size_t k = 0; k < n; k++) /* what matches nothing is passed; a tree part only where a path part begins */
			if (now[k] && (r->tokens[k].kind == T_STAR || r->tokens[k].kind == T_TREE ||
				       (r->tokens[k].kind == T_TREE_SLASH && now[k] == 1)))
				now[k + 1] = 1;
		if (i == len)
			return now[n] != 0;
		uint8_t c = (uint8_t)text[i], f = folded ? fold(c) : c;
		bool alive = false;
		memset(next, 0, n + 1);
		for (size_t k = 0; k < n; k++) {
			const struct token *t = &r->tokens[k];
			if (!now[k])
				continue;
			switch ((enum token_kind)t->kind) {
			case T_BYTE:
				if ((folded ? fold(t->byte) : t->byte) == f)
					next[k + 1] = 1;
				break;
			case T_ANY:
				if (c != '/')
					next[k + 1] = 1;
				break;
			case T_SET:
				if (has_bit(&r->sets[t->set], c) ||
				    (folded && c != '/' && (has_bit(&r->sets[t->set], f) ||
							    (f >= 'a' && f <= 'z' && has_bit(&r->sets[t->set], f - 32u)))))
					next[k + 1] = 1;
				break;
			case T_STAR:
				if (c != '/')
					next[k] = 1;
				break;
			case T_TREE:
				next[k] = 1;
				break;
			case T_TREE_SLASH: /* 2 = inside a part that it swallows; its end is the slash */
				if (!next[k])
					next[k] = 2;
				if (c == '/')
					next[k + 1] = 1;
				break;
			}
			alive = true;
		}
		if (!alive)
			return false;
		uint8_t *swap = now;
		now = next;
		next = swap;
	}
}

static bool same(const char *a, const char *b, size_t len, bool folded)
{
	if (!folded)
		return memcmp(a, b, len) == 0;
	for (size_t i = 0; i < len; i++)
		if (fold((uint8_t)a[i]) != fold((uint8_t)b[i]))
			return false;
	return true;
}

static bool rule_matches(const struct rule *r, const struct gi_path *p, unsigned flags)
{
	bool folded = (flags & GI_FOLD) != 0;
	size_t from = r->basename ? p->name : r->absolute ? 1 : p->rel;
	if ((r->dir_only && !(flags & GI_DIR)) || ((flags & GI_DOTGIT) && !r->dotgit) ||
	    ((flags & GI_FLOOR) && !r->floor))
		return false;
	if ((flags & GI_OUTSIDE) && !r->basename && !r->floating && !r->absolute)
		return false;
	const char *text = p->abs + from;
	size_t len = p->len - from;
	if (len < r->literal || !same(text, r->text, r->literal, folded))
		return false;
	if (r->ntokens == 0)
		return len == r->literal;
	if (len < r->tail || !same(text + len - r->tail, r->text + r->len - r->tail, r->tail, folded))
		return false;
	return run(r, text + r->literal, len - r->literal, folded);
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
			const struct rule *r = &s->rules[w * 64 + bit];
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
		const struct rule *r = &s->rules[i];
		if (!r->negate && !r->basename && !r->dead && r->literal == r->len)
			each(ctx, r->text, r->len, r->absolute);
	}
}
