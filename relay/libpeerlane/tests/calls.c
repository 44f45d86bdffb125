/* calls SOCKET GPU MODE: what a program gets from a relay that is not one. A line for
 * each call: its name, its status, its sentence. */
#include <unistd.h>

#include "peerlane_wire.h"
#include "test.h"

static int tell(const char *call, int status)
{
	printf("%s %d %s\n", call, status, status ? peerlane_error() : "");
	fflush(stdout);
	return status;
}

int main(int argc, char **argv)
{
	peerlane_session *s;
	peerlane_gpu gpu;
	peerlane_memory memory = 0;
	peerlane_operation operations[3] = {0};
	peerlane_connection connection = 0;
	struct peerlane_allocation allocation = {.fd = STDIN_FILENO, .bytes = 2 * MIB};
	struct peerlane_counters counters;
	struct peerlane_lane lanes[PEERLANE_MAX_LANES];
	struct peerlane_nic nic;
	peerlane_handle handle = {{0}};
	peerlane_listener listener;
	unsigned count;
	void *data;

	must(argc == 4);
	ok(peerlane_gpu_parse(argv[2], &gpu));
	if (!strcmp(argv[3], "full")) { /* until the test lets it in, the queue of the socket is */
		tell("dial", peerlane_dial(argv[1], NULL, 0, 300, &s));
		must(s == NULL);
		say("waits");
	}
	if (tell("dial", peerlane_dial(argv[1], NULL, 0, 60000, &s))) {
		must(s == NULL);
		return 0;
	}
	if (!strcmp(argv[3], "requests")) {
		tell("statistics", peerlane_statistics(s, &counters, sizeof counters));
		tell("lanes", peerlane_lanes(s, lanes, PEERLANE_MAX_LANES, &count));
		if (!tell("nic", peerlane_lane_nic(s, &gpu, &nic)))
			must(memchr(nic.name, 0, sizeof nic.name));
		tell("export", peerlane_export(s, &allocation, 1, &gpu, 0, &memory));
		tell("host", peerlane_host_memory(s, 4096, &gpu, 0, &data, &memory));
		tell("listen", peerlane_listen(s, &gpu, &listener, &handle));
		tell("connect", peerlane_connect(s, &gpu, &handle, &connection));
		tell("connect", peerlane_connect(s, &gpu, &handle, &connection));
	} else if (!strcmp(argv[3], "early")) {
		tell("listen", peerlane_listen(s, &gpu, &listener, &handle));
		hear();
		tell("connect", peerlane_connect(s, &gpu, &handle, &connection));
		tell("connect", peerlane_connect(s, &gpu, &handle, &connection));
	} else if (!strcmp(argv[3], "lists")) {
		struct peerlane_remote_key_layout layout = {.magic = PEERLANE_REMOTE_KEY_MAGIC};
		peerlane_remote_key key;
		struct peerlane_list_entry entries[2] = {{.memory = 1, .length = 8, .key = &key}, {.memory = 1, .length = 8, .key = &key}};
		uint32_t failed = 9;

		memcpy(&key, &layout, sizeof key);
		if (!tell("list", peerlane_read_list(s, 1, entries, 2, NULL, &failed, &operations[0]))) {
			tell("wait", peerlane_wait(s, operations[0], 60000, NULL));
			printf("entry %u\n", failed);
			fflush(stdout);
		}
	} else if (strcmp(argv[3], "full")) { /* the ring */
		for (int i = 0; i < 3; i++)
			ok(peerlane_receive(s, 1, 1, 0, 100, NULL, &operations[i]));
		say("posted");
		hear();
		tell("wait", peerlane_wait(s, operations[0], !strcmp(argv[3], "good") ? -1 : 60000, NULL));
		tell("poll", peerlane_session_status(s));
		tell("send", peerlane_send(s, 1, 1, 0, 100, NULL, &operations[1]));
	}
	peerlane_close(s);
	say("closed");
	return 0;
}
