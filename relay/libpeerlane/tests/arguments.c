/* arguments SOCKET GPU: what cannot be is an error, and what it says. Without a relay
 * where SOCKET is none. */
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "test.h"

#define INVALID PEERLANE_STATUS_INVALID

/* quiet takes all results, and waits until the descriptor has nothing more to tell:
 * the relay's bell can come later than what it rings for. */
static void quiet(peerlane_session *s, int fd)
{
	struct pollfd ready = {fd, POLLIN, 0};
	struct peerlane_result results[4];
	unsigned count;

	for (int tries = 0; tries < 1000; tries++) {
		while (peerlane_poll(s, results, 4, &count), count)
			;
		if (poll(&ready, 1, 50) == 0)
			return;
	}
	must(!"the descriptor is readable for ever");
}

int main(int argc, char **argv)
{
	struct peerlane_connection_info info;
	struct peerlane_allocation allocation = {.fd = -1, .bytes = 2 * MIB}, two[2] = {{.kind = 1}};
	struct peerlane_counters counters, small;
	struct peerlane_options options = {.flags = 4};
	struct peerlane_result results[4];
	struct peerlane_lane lane;
	struct peerlane_nic nic;
	uint64_t id;
	peerlane_operation operation, more[PEERLANE_MAX_OPERATIONS + 1];
	peerlane_connection connection;
	peerlane_listener listener;
	peerlane_handle handle = {{0}};
	peerlane_session *s = NULL;
	peerlane_region region;
	peerlane_remote_key key = {{0}};
	peerlane_memory memory;
	uint64_t value;
	char long_path[200], text[41];
	unsigned count;
	size_t bytes;
	void *page;
	int fd, status;

	must(argc == 3);
	/* No session. */
	must(!strcmp(peerlane_error(), ""));
	demand(INVALID, peerlane_session_status(NULL));
	demand(INVALID, peerlane_send(NULL, 1, 1, 0, 0, NULL, &operation));
	demand(INVALID, peerlane_flush(NULL, 1, NULL, &operation));
	demand(INVALID, peerlane_write(NULL, 1, 1, 0, 0, NULL, 0, NULL, &operation));
	demand(INVALID, peerlane_read(NULL, 1, 1, 0, 0, NULL, 0, NULL, &operation));
	demand(PEERLANE_STATUS_BAD_KEY, peerlane_read(NULL, 1, 1, 0, 0, &key, 0, NULL, &operation));
	demand(INVALID, peerlane_expose(NULL, 1, 0, 1, 0, 1, PEERLANE_REMOTE_READ, &region, &key));
	demand(INVALID, peerlane_expose(NULL, 1, 0, 1, 0, 1, PEERLANE_REMOTE_READ, NULL, &key));
	demand(INVALID, peerlane_expose(NULL, 1, 0, 1, 0, 1, PEERLANE_REMOTE_READ, &region, NULL));
	demand(INVALID, peerlane_revoke(NULL, 1));
	demand(INVALID, peerlane_test(NULL, 1, NULL));
	demand(INVALID, peerlane_wait(NULL, 1, 0, NULL));
	demand(INVALID, peerlane_poll(NULL, results, 4, &count));
	demand(INVALID, peerlane_cancel(NULL, 1));
	demand(INVALID, peerlane_unexport(NULL, 1));
	demand(INVALID, peerlane_accept(NULL, 1, 0, &connection));
	demand(INVALID, peerlane_unlisten(NULL, 1));
	demand(INVALID, peerlane_disconnect(NULL, 1));
	demand(INVALID, peerlane_timelines(NULL, &page, &bytes));
	demand(INVALID, peerlane_timeline_value(NULL, 0, &value));
	demand(INVALID, peerlane_event_descriptor(NULL, &fd));
	demand(INVALID, peerlane_unregister_timelines(NULL));
	demand(INVALID, peerlane_hand_over(NULL, 0, PEERLANE_TURN_STREAM));
	demand(INVALID, peerlane_hand_over_status(NULL, 0));
	demand(INVALID, peerlane_stream_take(NULL, NULL, 0));
	demand(INVALID, peerlane_stream_give(NULL, NULL, PEERLANE_TIMELINES));
	demand(INVALID, peerlane_stream_wait(NULL, NULL, 0, 1));
	demand(INVALID, peerlane_stream_advance(NULL, NULL, 0, 1));
	peerlane_close(NULL);
	must(peerlane_protocol(NULL) == 0);

	/* No relay. */
	peerlane_gpu gpu, none[2];
	ok(peerlane_gpu_parse(argv[2], &gpu));
	peerlane_gpu_format(&gpu, text);
	must(!strcmp(text, argv[2]));
	none[0] = none[1] = gpu;
	demand(INVALID, peerlane_gpu_parse("GPU-123", &gpu));
	demand(INVALID, peerlane_gpu_parse("GPU-00000000-0000-0000-0000-0000000000zz", &gpu));
	demand(PEERLANE_STATUS_NO_RELAY, peerlane_dial("/nowhere/at/all", NULL, 0, -1, &s));
	must(s == NULL && strstr(peerlane_error(), "No such file") && strstr(peerlane_error(), "--device peerlane.dev/lane=N"));
	demand(PEERLANE_STATUS_NO_RELAY, peerlane_dial("/nowhere/at/all", none, 2, -1, &s));
	must(strstr(peerlane_error(), "--device peerlane.dev/lane=GPU-") && strstr(peerlane_error(), argv[2]));
	memset(long_path, 'x', sizeof long_path - 1);
	long_path[sizeof long_path - 1] = 0;
	demand(INVALID, peerlane_dial(long_path, NULL, 0, -1, &s));
	demand(INVALID, peerlane_dial(argv[1], NULL, 0, -1, NULL));

	ok(peerlane_dial(argv[1], NULL, 0, -1, &s));
	must(peerlane_protocol(s) >= 1);
	demand(INVALID, peerlane_export(s, NULL, 1, &gpu, 0, &memory));
	demand(INVALID, peerlane_export(s, &allocation, 1, &gpu, 0, &memory));
	demand(PEERLANE_STATUS_INVALID, peerlane_export(s, two, 2, &gpu, 0, &memory));
	allocation.fd = 1000; /* which is not open */
	demand(INVALID, peerlane_export(s, &allocation, 1, &gpu, 0, &memory));
	allocation.fd = open("/dev/null", O_RDWR);
	allocation.kind = 99;
	demand(INVALID, peerlane_export(s, &allocation, 1, &gpu, 0, &memory));
	allocation.kind = PEERLANE_ALLOCATION_VMM;
	demand(PEERLANE_STATUS_BAD_DESCRIPTOR, peerlane_export(s, &allocation, 1, &gpu, 0, &memory));
	demand(PEERLANE_STATUS_MALFORMED, peerlane_export(s, &allocation, 1, &gpu, 64, &memory));
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, peerlane_unexport(s, 12345));
	demand(INVALID, peerlane_listen(s, NULL, &listener, &handle));
	demand(PEERLANE_STATUS_BAD_HANDLE, peerlane_connect(s, &gpu, &handle, &connection));
	gpu.bytes[0] ^= 0xff;
	demand(PEERLANE_STATUS_WRONG_GPU, peerlane_listen(s, &gpu, &listener, &handle));
	must(strstr(peerlane_error(), argv[2])); /* the one that has a lane */
	gpu.bytes[0] ^= 0xff;
	demand(PEERLANE_STATUS_UNKNOWN_LISTENER, peerlane_accept(s, 0, 0, &connection));
	demand(PEERLANE_STATUS_UNKNOWN_LISTENER, peerlane_accept(s, 99, -1, &connection));
	demand(PEERLANE_STATUS_UNKNOWN_LISTENER, peerlane_unlisten(s, 99));
	demand(PEERLANE_STATUS_UNKNOWN_CONNECTION, peerlane_connection_get(s, 99, &info));
	demand(PEERLANE_STATUS_UNKNOWN_CONNECTION, peerlane_connection_status(s, 99));
	ok(peerlane_disconnect(s, 99)); /* which is down */
	demand(INVALID, peerlane_test(s, 0, NULL));
	demand(INVALID, peerlane_wait(s, 77, -1, NULL));
	demand(INVALID, peerlane_wait(s, ~(uint64_t)0, -1, NULL));
	demand(INVALID, peerlane_cancel(s, 77));
	demand(INVALID, peerlane_send(s, 1, 1, 0, 0, &options, &operation));

	/* Programs that were compiled with other headers. */
	memset(&counters, 0xff, sizeof counters);
	memset(&small, 0xff, sizeof small);
	ok(peerlane_statistics(s, &counters, sizeof counters));
	ok(peerlane_statistics(s, &small, 16));
	must(small.sent == counters.sent && small.direct == ~(uint64_t)0);
	ok(peerlane_lanes(s, NULL, 0, &count));
	must(count == 1);
	ok(peerlane_lanes(s, &lane, 1, &count));
	must(!memcmp(&lane.gpu, &gpu, sizeof gpu));
	ok(peerlane_lane_nic(s, &gpu, &nic));
	must(nic.guid == 0xfeedf00d12345678 && nic.mbps == 400000 && nic.port == 2 && !strcmp(nic.name, "nic0"));
	demand(INVALID, peerlane_lane_nic(s, NULL, &nic));
	demand(INVALID, peerlane_lane_nic(s, &gpu, NULL));
	demand(INVALID, peerlane_pointer_id(&nic, 0, &id));
	demand(INVALID, peerlane_pointer_id(&nic, ~(uint64_t)0, &id));
	demand(INVALID, peerlane_pointer_id(&nic, 1, NULL));
	demand(PEERLANE_STATUS_WRONG_GPU, peerlane_lane_nic(s, &(peerlane_gpu){{1}}, &nic));

	/* Accepts that were given up: the next sender is the next accept's. */
	ok(peerlane_listen(s, &gpu, &listener, &handle));
	demand(PEERLANE_STATUS_TIMED_OUT, peerlane_accept(s, listener, 0, &connection));
	demand(PEERLANE_STATUS_TIMED_OUT, peerlane_accept(s, listener, 10, &connection));
	peerlane_connection sending, receiving, unseen;
	ok(peerlane_connect(s, &gpu, &handle, &sending));
	ok(peerlane_accept(s, listener, -1, &receiving));
	ok(peerlane_connection_get(s, receiving, &info));
	must(info.status == 0 && info.route == PEERLANE_ROUTE_DIRECT && !strcmp(info.peer, "container a"));
	demand(PEERLANE_STATUS_TIMED_OUT, peerlane_accept(s, listener, 0, &connection));
	ok(peerlane_connect(s, &gpu, &handle, &unseen));
	ok(peerlane_unlisten(s, listener));
	/* What nobody accepted is taken down. */
	do {
		ok(peerlane_connection_get(s, unseen, &info));
		usleep(1000);
	} while (!info.status);
	demand(PEERLANE_STATUS_PEER_CLOSED, peerlane_connection_status(s, unseen));

	/* An operation that is none fails by itself, with a sentence. */
	ok(peerlane_send(s, sending, 4242, 0, 8, NULL, &operation));
	demand(PEERLANE_STATUS_UNKNOWN_MEMORY, peerlane_wait(s, operation, -1, &value));
	must(strstr(peerlane_error(), "on the connection with container a"));
	ok(peerlane_send(s, 4242, 1, 0, 8, NULL, &operation));
	demand(PEERLANE_STATUS_UNKNOWN_CONNECTION, peerlane_wait(s, operation, -1, &value));

	/* With memory: order, contexts, cancels, and the event descriptor. */
	gpu_open();
	struct side a = {.session = s};
	a.gpu = gpu_use(&gpu);
	a.room = gpu_allocate(&a.gpu, 4 * MIB);
	/* By its address, from the middle on. */
	uint64_t address = a.room.address + 2 * MIB;
	ok(peerlane_export_pointer(s, (void *)(uintptr_t)address, 4096, PEERLANE_ACCESS_SEND, &memory));
	demand(PEERLANE_STATUS_CUDA, peerlane_export_pointer(s, (void *)(uintptr_t)address, 2 * MIB + 1, 0, &memory));
	demand(PEERLANE_STATUS_CUDA, peerlane_export_pointer(s, &count, 8, 0, &memory));
	must(strstr(peerlane_error(), "CUDA_ERROR_"));
	allocation = (struct peerlane_allocation){.fd = a.room.fd, .bytes = a.room.bytes};
	ok(peerlane_export(s, &allocation, 1, &gpu, 0, &a.memory));
	put(&a, 2 * MIB + 100, 1000, 5);
	ok(peerlane_event_descriptor(s, &fd));
	struct pollfd ready = {fd, POLLIN, 0};
	struct peerlane_options marked = {.context = 17};
	ok(peerlane_receive(s, receiving, a.memory, 0, 4096, &marked, &more[0]));
	quiet(s, fd);
	ok(peerlane_send(s, sending, memory, 100, 1000, NULL, NULL)); /* nobody wants its result */
	must(poll(&ready, 1, 60000) == 1);
	do {
		ok(peerlane_poll(s, results, 4, &count));
	} while (!count);
	must(count == 1 && results[0].operation == more[0] && results[0].context == 17 && results[0].moved == 1000 && results[0].connection == receiving);
	verify(&a, 0, 1000, 5);
	quiet(s, fd);
	demand(PEERLANE_STATUS_PENDING, (peerlane_receive(s, receiving, a.memory, 0, 8, NULL, &operation), peerlane_test(s, operation, NULL)));
	ok(peerlane_cancel(s, operation));
	demand(PEERLANE_STATUS_CANCELED, peerlane_wait(s, operation, -1, NULL));

	/* More than there is room for. */
	for (count = 0; (status = peerlane_receive(s, receiving, a.memory, 0, 8, NULL, &more[count])) == 0 && count < PEERLANE_MAX_OPERATIONS; count++)
		;
	must(status == PEERLANE_STATUS_FULL && count >= PEERLANE_RING_ENTRIES && count <= PEERLANE_MAX_OPERATIONS);
	unsigned posted = count, got = 0;
	ok(peerlane_disconnect(s, sending)); /* which ends them all */
	while (got < posted) {
		struct peerlane_result many[100];

		ok(peerlane_poll(s, many, 100, &count));
		for (unsigned i = 0; i < count; i++)
			must(many[i].status == PEERLANE_STATUS_PEER_CLOSED);
		got += count;
		if (!count)
			must(poll(&ready, 1, 60000) == 1);
	}
	/* And none of it is lost. */
	ok(peerlane_receive(s, receiving, a.memory, 0, 8, NULL, &operation));
	demand(PEERLANE_STATUS_PEER_CLOSED, peerlane_wait(s, operation, -1, NULL));
	must(strstr(peerlane_error(), "container a closed the connection"));
	peerlane_close(s);
	return 0;
}
