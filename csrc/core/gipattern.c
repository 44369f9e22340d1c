/* gipattern.c — see gipattern.h. A match is the simulation of a small automaton: no pattern makes it slow. */
#define _GNU_SOURCE 1 /* memrchr */
#include "gipattern.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "gitignore.h"

static bool special(char c)
{
	return c == '*' || c == '?' || c == '[' || c == '\\';
}

uint8_t gi_fold(uint8_t c)
{
	return c >= 'A' && c <= 'Z' ? (uint8_t)(c + 32) : c;
}

static void set_bit(struct gi_byteset *s, unsigned c)
{
	s->bits[c >> 3] |= (uint8_t)(1u << (c & 7));
}

static bool has_bit(const struct gi_byteset *s, unsigned c)
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
static size_t read_bracket(const char *p, size_t len, struct gi_byteset *out)
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
static int compile_tokens(struct gi_rule *r)
{
	const char *p = r->text + r->literal;
	size_t n = r->len - r->literal;
	r->tokens = calloc(n + 1, sizeof *r->tokens);
	if (!r->tokens)
		return -ENOMEM;
	for (size_t i = 0; i < n;) {
		struct gi_token t = {.kind = T_BYTE, .byte = (uint8_t)p[i]};
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
			struct gi_byteset *more = realloc(r->sets, (r->nsets + 1) * sizeof *more);
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

void gi_rule_free(struct gi_rule *r)
{
	free(r->text);
	free(r->tokens);
	free(r->sets);
	memset(r, 0, sizeof *r);
}

static bool has_part(const char *p, size_t len, const char *part)
{
	size_t n = strlen(part);
	for (size_t i = 0; i + n <= len; i++) {
		size_t k = 0;
		while (k < n && gi_fold((uint8_t)p[i + k]) == (uint8_t)part[k])
			k++;
		if (k == n && (i == 0 || p[i - 1] == '/') && (i + n == len || p[i + n] == '/'))
			return true;
	}
	return false;
}

/* Fill the derived fields of a rule from its text (no leading, no trailing slash left). */
int gi_rule_finish(struct gi_rule *r)
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

/* The byte that the last name of every match begins with, or -1 when the pattern leaves it open: a wildcard there, a
 * slash inside brackets, two stars that may also match nothing between two halves of one name. */
int gi_rule_first(const struct gi_rule *r)
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

/* Simulate the automaton: `now` holds the token positions that the text read so far can have reached. */
static bool run(const struct gi_rule *r, const char *text, size_t len, bool folded)
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
		uint8_t c = (uint8_t)text[i], f = folded ? gi_fold(c) : c;
		bool alive = false;
		memset(next, 0, n + 1);
		for (size_t k = 0; k < n; k++) {
			const struct gi_token *t = &r->tokens[k];
			if (!now[k])
				continue;
			switch ((enum gi_token_kind)t->kind) {
			case T_BYTE:
				if ((folded ? gi_fold(t->byte) : t->byte) == f)
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
		if (gi_fold((uint8_t)a[i]) != gi_fold((uint8_t)b[i]))
			return false;
	return true;
}

int gi_rule_last(const struct gi_rule *r)
{
	char end = r->text[r->len - 1];
	return !special(end) && end != ']' ? (uint8_t)end : -1;
}

bool gi_rule_text(const struct gi_rule *r, const char *text, size_t len, bool folded)
{
	if (len < r->literal || !same(text, r->text, r->literal, folded))
		return false;
	text += r->literal;
	len -= r->literal;
	if (r->ntokens == 0)
		return len == 0;
	if (len < r->tail || !same(text + len - r->tail, r->text + r->len - r->tail, r->tail, folded))
		return false;
	return run(r, text, len, folded);
}
