/* onesided SOCKET_A SOCKET_B GPU_A GPU_B: a reads and writes what b has offered, and b
 * does nothing for it. */
#include "test.h"

#define BYTES 300001u
#define HALF (1u << 20)
#define MANY 16u

static struct side a, b;

/* ended demands that status of an operation of a's that was posted. */
#define ended(want, posted) \
	do { \
		peerlane_operation operation; \
		ok(posted); \
		demand(want, peerlane_wait(a.session, operation, -1, NULL)); \
	} while (0)

int main(int argc, char **argv)
{
	struct peerlane_options context = {.context = 77};
	peerlane_remote_key key, other, wrong;
	peerlane_region region, second;
	peerlane_operation operation, operations[MANY];
	peerlane_listener listener;
	peerlane_handle handle;
	struct peerlane_result result;
	uint64_t moved;
	unsigned count;
	int status;

	must(argc == 5);
	gpu_open();
	b = attach(argv[2], argv[4], 2 * MIB);
	a = attach(argv[1], argv[3], 2 * MIB);
	ok(peerlane_listen(b.session, &b.gpu.uuid, &listener, &handle));
	demand(PEERLANE_STATUS_TIMED_OUT, peerlane_accept(b.session, listener, 0, &b.connection)); /* nobody is there */
	ok(peerlane_connect(a.session, &a.gpu.uuid, &handle, &a.connection));
	while ((status = peerlane_accept(b.session, listener, 0, &b.connection)) == PEERLANE_STATUS_TIMED_OUT)
		;
	must(!status);

	/* Whole ranges, to and fro. */
	ok(peerlane_expose(b.session, listener, 0, b.memory, HALF, HALF, PEERLANE_REMOTE_READ | PEERLANE_REMOTE_WRITE, &region, &key));
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	put(&b, HALF, BYTES, 1);
	ok(peerlane_read(a.session, a.connection, a.memory, 5, BYTES, &key, 0, NULL, &operation));
	ok(peerlane_wait(a.session, operation, -1, &moved));
	must(moved == BYTES);
	gpu_check(cuda.set_context(a.gpu.context), "cuCtxSetCurrent");
	verify(&a, 5, BYTES, 1);
	put(&a, 7, BYTES, 2);
	ended(PEERLANE_STATUS_OK, peerlane_write(a.session, a.connection, a.memory, 7, BYTES, &key, 11, NULL, &operation));
	gpu_check(cuda.set_context(b.gpu.context), "cuCtxSetCurrent");
	verify(&b, HALF + 11, BYTES, 2);
	ended(PEERLANE_STATUS_OK, peerlane_read(a.session, a.connection, a.memory, 0, 0, &key, 0, NULL, &operation));

	/* Many at once, and a flush behind them, which tells of what failed. */
	for (uint64_t i = 0; i < MANY; i++)
		ok(peerlane_write(a.session, a.connection, a.memory, 7, 1000, &key, i * 1000, NULL, &operations[i]));
	ended(PEERLANE_STATUS_OK, peerlane_flush(a.session, a.connection, NULL, &operation));
	for (uint64_t i = 0; i < MANY; i++) {
		ok(peerlane_test(a.session, operations[i], &moved)); /* has ended, before the flush */
		verify(&b, HALF + i * 1000, 1000, 2);
	}
	ended(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_write(a.session, a.connection, a.memory, 0, 8, &key, HALF - 7, NULL, &operation));
	ended(PEERLANE_STATUS_OUT_OF_RANGE, peerlane_flush(a.session, a.connection, NULL, &operation));
	ok(peerlane_flush(a.session, a.connection, &context, &operation));
	do
		ok(peerlane_poll(a.session, &result, 1, &count));
	while (!count);
	must(result.operation == operation && result.context == 77 && result.status == 0);

	/* What keys do not allow. */
	ok(peerlane_expose(b.session, 0, b.connection, b.memory, 0, 8, PEERLANE_REMOTE_READ, &second, &other));
	must(region != second && memcmp(&key, &other, sizeof key));
	ended(PEERLANE_STATUS_OK, peerlane_read(a.session, a.connection, a.memory, 0, 8, &other, 0, NULL, &operation));
	ended(PEERLANE_STATUS_NOT_PERMITTED, peerlane_write(a.session, a.connection, a.memory, 0, 8, &other, 0, NULL, &operation));
	must(strstr(peerlane_error(), "container b"));
	wrong = key;
	wrong.bytes[20] ^= 1;
	ended(PEERLANE_STATUS_BAD_KEY, peerlane_read(a.session, a.connection, a.memory, 0, 8, &wrong, 0, NULL, &operation));
	wrong.bytes[0] ^= 1;
	demand(PEERLANE_STATUS_BAD_KEY, peerlane_read(a.session, a.connection, a.memory, 0, 8, &wrong, 0, NULL, &operation));
	ok(peerlane_revoke(b.session, region));
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, peerlane_revoke(b.session, region));
	ended(PEERLANE_STATUS_BAD_KEY, peerlane_read(a.session, a.connection, a.memory, 0, 8, &key, 0, NULL, &operation));
	demand(PEERLANE_STATUS_MALFORMED, peerlane_expose(b.session, 0, 0, b.memory, 0, 8, PEERLANE_REMOTE_READ, &region, &key));
	demand(PEERLANE_STATUS_MALFORMED, peerlane_expose(b.session, listener, 0, b.memory, 0, 8, 0, &region, &key));
	demand(PEERLANE_STATUS_MALFORMED, peerlane_expose(a.session, 0, a.connection, a.memory, 0, 8, PEERLANE_REMOTE_READ, &region, &key));
	must(strstr(peerlane_error(), "accepted"));

	/* One that waits is canceled, and the rest ends with the session. */
	context.flags = PEERLANE_AFTER;
	context.after_value = 1;
	ok(peerlane_read(a.session, a.connection, a.memory, 0, 8, &other, 0, &context, &operation));
	ok(peerlane_cancel(a.session, operation));
	demand(PEERLANE_STATUS_CANCELED, peerlane_wait(a.session, operation, -1, NULL));
	ok(peerlane_unlisten(b.session, listener));
	peerlane_close(b.session);
	ok(peerlane_read(a.session, a.connection, a.memory, 0, 8, &other, 0, NULL, &operation));
	demand(PEERLANE_STATUS_PEER_CLOSED, peerlane_wait(a.session, operation, -1, NULL));
	peerlane_close(a.session);
	return 0;
}
