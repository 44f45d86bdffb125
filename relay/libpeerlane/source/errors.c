#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static __thread struct reason last;

const char *peerlane_error(void) { return last.text; }

int peerlane_error_status(void) { return last.status; }

const char *peerlane_status_text(int status)
{
	switch (status) {
#define TEXT(number, text) \
	case number: \
		return text;
	PEERLANE_STATUSES(TEXT)
#undef TEXT
	case PEERLANE_STATUS_PENDING:
		return "the operation has not ended";
	case PEERLANE_STATUS_TIMED_OUT:
		return "timed out";
	case PEERLANE_STATUS_INVALID:
		return "invalid argument";
	case PEERLANE_STATUS_FULL:
		return "too many operations have not ended, or their results were not taken";
	case PEERLANE_STATUS_NO_RELAY:
		return "no relay";
	case PEERLANE_STATUS_FORKED:
		return "the session is that of the process before fork()";
	case PEERLANE_STATUS_SYSTEM:
		return "the system refused something";
	}
	return "a status that this version does not know";
}

int fail_call(int status, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(last.text, sizeof last.text, format, arguments);
	va_end(arguments);
	last.status = status;
	return status;
}

int fail_for(const struct reason *why)
{
	last = *why;
	return last.status;
}

void give_reason(struct reason *r, int status, const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(r->text, sizeof r->text, format, arguments);
	va_end(arguments);
	r->status = status;
}

/* utf8 is how many bytes the character at p has, 0 if it is none. */
static size_t utf8(const unsigned char *p, size_t n)
{
	size_t length = p[0] < 0x80 ? 1 : p[0] >= 0xc2 && p[0] < 0xe0 ? 2 : p[0] >= 0xe0 && p[0] < 0xf0 ? 3 : p[0] >= 0xf0 && p[0] < 0xf5 ? 4 : 0;

	if (length > n)
		return 0;
	for (size_t i = 1; i < length; i++)
		if ((p[i] & 0xc0) != 0x80)
			return 0;
	if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] >= 0xa0) || (p[0] == 0xf0 && p[1] < 0x90) || (p[0] == 0xf4 && p[1] >= 0x90))
		return 0;
	return length;
}

/* copy_text reads a zero-padded field of a message. Control characters do not reach
 * a terminal or a log. */
void copy_text(char *to, size_t room, const char *from, size_t n)
{
	const unsigned char *p = (const unsigned char *)from;
	size_t out = 0;

	n = strnlen(from, n);
	for (size_t i = 0; i < n;) {
		size_t length = utf8(p + i, n - i);

		if (length == 0 || p[i] < ' ' || p[i] == 0x7f) {
			if (out + 1 >= room)
				break;
			to[out++] = '?';
			i++;
			continue;
		}
		if (out + length >= room)
			break;
		memcpy(to + out, p + i, length);
		out += length;
		i += length;
	}
	to[out] = 0;
}
