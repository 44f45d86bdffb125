/* lists SOCKET_A SOCKET_B GPU_A GPU_B: a reads and writes lists of ranges that b has exposed. */
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

#define EACH 100u
#define MANY 3000u /* entries: several parts */

static struct side a, b;
static struct peerlane_list_entry entries[MANY];
static struct peerlane_list_entry most[PEERLANE_MAX_LIST_ENTRIES];

/* gaps makes entries whose destination has gaps. */
static void gaps(const peerlane_remote_key *key)
{
	for (unsigned i = 0; i < MANY; i++)
		entries[i] = (struct peerlane_list_entry){.memory = a.memory, .offset = i * EACH, .length = EACH, .at = (uint64_t)i * 2 * EACH, .key = key};
}

int main(int argc, char **argv)
{
	struct peerlane_options context = {.context = 77};
	peerlane_remote_key key, toread, wrong;
	peerlane_region region, second;
	peerlane_operation operation, first, next;
	struct peerlane_result result;
	uint64_t moved;
	uint32_t failed = 99;
	unsigned count;
	int status;
	pid_t child;

	must(argc == 5);
	gpu_open();
	b = attach(argv[2], argv[4], 2 * MIB);
	a = attach(argv[1], argv[3], 2 * MIB);
	join(&a, &b);
	ok(peerlane_expose(b.session, 0, b.connection, b.memory, 0, MIB, PEERLANE_REMOTE_READ | PEERLANE_REMOTE_WRITE, &region, &key));
	ok(peerlane_expose(b.session, 0, b.connection, b.memory, 0, MIB, PEERLANE_REMOTE_READ, &second, &toread));

	/* To and fro, in several parts, and the result by each of the calls. */
	gaps(&key);
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	put(&a, 0, MANY * EACH, 1);
	ok(peerlane_write_list(a.session, a.connection, entries, MANY, NULL, &failed, &operation));
	memset(entries, 0xff, sizeof entries); /* the library has its copy */
	ok(peerlane_wait(a.session, operation, -1, &moved));
	must(moved == MANY * EACH && failed == 99);
	gaps(&key);
	for (unsigned i = 0; i < MANY; i++)
		entries[i].offset += MIB;
	ok(peerlane_read_list(a.session, a.connection, entries, MANY, &context, NULL, &operation));
	do
		ok(peerlane_poll(a.session, &result, 1, &count));
	while (!count);
	must(result.operation == operation && result.context == 77 && result.status == 0 && result.moved == MANY * EACH);
	verify(&a, MIB, MANY * EACH, 1);

	/* The first entry that fails, here and there. */
	entries[2100].at = MIB - EACH + 1;
	entries[2500].memory = 999;
	ok(peerlane_read_list(a.session, a.connection, entries, MANY, NULL, &failed, &operation));
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_wait(a.session, operation, -1, &moved));
	must(failed == 2100 && moved % EACH == 0 && moved < MANY * EACH);
	gaps(&key);
	entries[5].key = &toread;
	ok(peerlane_write_list(a.session, a.connection, entries, MANY, NULL, &failed, &operation));
	demand(PEERLANE_STATUS_NOT_PERMITTED, peerlane_wait(a.session, operation, -1, NULL));
	must(failed == 5 && strstr(peerlane_error(), "container b"));
	entries[0].memory = 999;
	ok(peerlane_write_list(a.session, a.connection, entries, 1, NULL, &failed, &operation));
	while ((status = peerlane_test(a.session, operation, NULL)) == PEERLANE_STATUS_PENDING)
		;
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, status);
	must(failed == 0);
	ok(peerlane_write_list(a.session, a.connection, entries, 1, NULL, NULL, NULL)); /* nobody wants its result */
	ok(peerlane_flush(a.session, a.connection, NULL, &operation));
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_wait(a.session, operation, -1, NULL));

	/* A child of fork() has no list memory. */
	gaps(&key);
	child = fork();
	must(child >= 0);
	if (!child) {
		demand(PEERLANE_STATUS_FORKED, peerlane_write_list(a.session, a.connection, entries, MANY, NULL, NULL, NULL));
		peerlane_close(a.session);
		_exit(0);
	}
	must(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);

	/* What the calls themselves refuse. */
	demand(PEERLANE_STATUS_INVALID, peerlane_write_list(NULL, a.connection, entries, MANY, NULL, NULL, NULL));
	wrong = key;
	wrong.bytes[0] ^= 1;
	entries[1].key = &wrong;
	demand(PEERLANE_STATUS_BAD_KEY, peerlane_read_list(a.session, a.connection, entries, MANY, NULL, NULL, &operation));
	must(strstr(peerlane_error(), "entry 1"));
	entries[1].key = NULL;
	demand(PEERLANE_STATUS_INVALID, peerlane_read_list(a.session, a.connection, entries, MANY, NULL, NULL, &operation));
	gaps(&key);
	entries[2].length = 0;
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_read_list(a.session, a.connection, entries, MANY, NULL, NULL, &operation));
	entries[2].length = UINT64_MAX;
	demand(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_read_list(a.session, a.connection, entries, MANY, NULL, NULL, &operation));
	entries[0].reserved = 1;
	demand(PEERLANE_STATUS_INVALID, peerlane_read_list(a.session, a.connection, entries, MANY, NULL, NULL, &operation));
	demand(PEERLANE_STATUS_INVALID, peerlane_read_list(a.session, a.connection, entries, 0, NULL, NULL, &operation));
	demand(PEERLANE_STATUS_INVALID, peerlane_read_list(a.session, a.connection, NULL, 1, NULL, NULL, &operation));
	demand(PEERLANE_STATUS_INVALID, peerlane_read_list(a.session, a.connection, entries, PEERLANE_MAX_LIST_ENTRIES + 1, NULL, NULL, &operation));

	/* All of the list memory; its end makes room, in the midst too. */
	gaps(&key);
	for (unsigned i = 0; i < PEERLANE_MAX_LIST_ENTRIES; i++)
		most[i] = (struct peerlane_list_entry){.memory = a.memory, .offset = i, .length = 1, .at = i, .key = &key};
	context.flags = PEERLANE_AFTER;
	context.after_value = 1;
	ok(peerlane_read_list(a.session, a.connection, most, MANY, &context, NULL, &first));
	ok(peerlane_read_list(a.session, a.connection, most, PEERLANE_MAX_LIST_ENTRIES - 2 * MANY, &context, NULL, &operation));
	ok(peerlane_read_list(a.session, a.connection, most, MANY, &context, NULL, &next));
	demand(PEERLANE_STATUS_FULL, peerlane_read_list(a.session, a.connection, most, 1, NULL, NULL, &operation));
	ok(peerlane_cancel(a.session, first));
	demand(PEERLANE_STATUS_CANCELED, peerlane_wait(a.session, first, -1, NULL));
	demand(PEERLANE_STATUS_FULL, peerlane_read_list(a.session, a.connection, most, MANY + 1, NULL, NULL, &first));
	ok(peerlane_read_list(a.session, a.connection, most, MANY, &context, NULL, &first));
	ok(peerlane_timeline_advance(a.session, 0, 1));
	ok(peerlane_wait(a.session, first, -1, &moved));
	must(moved == MANY);
	ok(peerlane_wait(a.session, next, -1, NULL));
	ok(peerlane_wait(a.session, operation, -1, NULL));

	/* The rest ends with the session of the other side. */
	peerlane_close(b.session);
	ok(peerlane_read_list(a.session, a.connection, entries, MANY, NULL, &failed, &operation));
	demand(PEERLANE_STATUS_PEER_CLOSED, peerlane_wait(a.session, operation, -1, NULL));
	peerlane_close(a.session);
	return 0;
}
