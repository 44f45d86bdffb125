/* Settings of NCCL's that differ between containers of one job: the hook and this plugin set
 * them in containers of one lane that reaches only this host, and the tuner chooses in those
 * whose lanes all do. A listener's handle carries them, and the connecting rank compares. */
#include "plugin.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "peerlane_wire.h"

#define NOTE offsetof(struct peerlane_handle_layout, note)

_Static_assert(sizeof(struct settings) == sizeof(((struct peerlane_handle_layout *)0)->note), "the handle has room for the settings");

/* NCCL's own values (init.cc, computeBuffSizes), so that a container which sets them by hand
 * fits one which does not. */
#define BUFFER ((uint32_t)4 << 20)
#define CHUNK ((uint32_t)128 << 10)
#define STEPS 8 /* of a buffer; a chunk is at most one */

/* value is a variable as NCCL reads it, without where it is not set or no number above zero. */
static uint32_t value(const char *name, uint32_t without)
{
	const char *text = getenv(name);
	char *end;
	long long n;

	if (!text)
		return without;
	errno = 0;
	n = strtoll(text, &end, 0);
	if (errno || end == text || n <= 0)
		return without;
	return n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
}

/* other_tuner reports whether the user has named a tuner that is not this library's. */
static bool other_tuner(void)
{
	const char *tuner = getenv("NCCL_TUNER_PLUGIN");

	return tuner && *tuner && !strcasestr(tuner, NAME);
}

static struct settings settings_of(const struct relay *r)
{
	struct settings s = {
		.form = SETTINGS_FORM,
		.lanes = (uint8_t)(r->lanes < UINT8_MAX ? r->lanes : UINT8_MAX),
		.local = reaches_only_host(r),
		.channels = value("NCCL_NCHANNELS_PER_NET_PEER", 0),
		.buffer = value("NCCL_BUFFSIZE", BUFFER),
		.chunk = value("NCCL_P2P_NET_CHUNKSIZE", CHUNK),
	};

	if (s.chunk > s.buffer / STEPS)
		s.chunk = s.buffer / STEPS;
	if (s.local && !other_tuner())
		s.tuner = channels_are_set() ? CHOICE_OF_LL : CHOICE_OF_LL_AND_CHANNELS;
	return s;
}

void put_settings(const struct relay *r, void *handle)
{
	struct settings s = settings_of(r);

	memcpy((char *)handle + NOTE, &s, sizeof s);
}

static const char *choice(uint8_t tuner)
{
	switch (tuner) {
	case CHOICE_OF_NCCL:
		return "NCCL's";
	case CHOICE_OF_LL:
		return "that of Peerlane's tuner with the user's channels (such as NCCL_MIN_NCHANNELS)";
	case CHOICE_OF_LL_AND_CHANNELS:
		return "that of Peerlane's tuner";
	}
	return "unknown";
}

/* in_words is a number, or NCCL's own. */
static const char *in_words(uint32_t n, char text[16])
{
	if (!n)
		return "NCCL's own";
	snprintf(text, 16, "%u", n);
	return text;
}

struct list {
	char text[DIFFERENCE / 2];
	size_t used;
};

static void add(struct list *l, const char *what, const char *here, const char *there)
{
	int n = snprintf(l->text + l->used, sizeof l->text - l->used, "%s%s is %s here and %s there", l->used ? ", " : "", what, here, there);

	if (n > 0)
		l->used += (size_t)n;
	if (l->used >= sizeof l->text)
		l->used = sizeof l->text - 1;
}

static void add_number(struct list *l, const char *what, uint32_t here, uint32_t there)
{
	char a[16], b[16];

	if (here != there)
		add(l, what, in_words(here, a), in_words(there, b));
}

static const char *reach(const struct settings *s) { return s->local ? "which reach only this host" : "on a network"; }

void compare_settings(const struct relay *r, const void *handle, char text[DIFFERENCE])
{
	struct settings here = settings_of(r), there;
	struct list differences = {.used = 0};

	*text = 0;
	memcpy(&there, (const char *)handle + NOTE, sizeof there);
	if (there.form != here.form)
		return;
	add_number(&differences, "NCCL_BUFFSIZE", here.buffer, there.buffer);
	add_number(&differences, "NCCL_P2P_NET_CHUNKSIZE", here.chunk, there.chunk);
	add_number(&differences, "NCCL_NCHANNELS_PER_NET_PEER", here.channels, there.channels);
	if (here.tuner != there.tuner)
		add(&differences, "the choice of protocols and channels", choice(here.tuner), choice(there.tuner));
	if (differences.used)
		snprintf(text, DIFFERENCE,
			"the listening rank's container has other NCCL settings, with which NCCL hangs: %s (lanes here: %u, %s; there: %u, %s). "
			"Give all containers of a job the same number of lanes, the same relay.scope and cluster key, and the same nccl.conf, or set these variables by hand in all of them",
			differences.text, here.lanes, reach(&here), there.lanes, reach(&there));
}
