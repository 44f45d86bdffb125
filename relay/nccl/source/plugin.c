/* The relay of the container, what NCCL's log hears of it, and its lanes as devices. */
#include "plugin.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

/* A lane's speed, where neither PEERLANE_NCCL_SPEED nor the relay says. NCCL only compares
 * it with paths between GPUs. */
#define SPEED 100000 /* Mbit/s */

/* The largest message: its size is an int in NCCL. */
#define LARGEST ((size_t)1 << 30)

const char no_relay[] = "this process has no relay";

static nccl_logger logger;

void set_logger(nccl_logger to) { __atomic_store_n(&logger, to, __ATOMIC_RELAXED); }

void write_log(int level, const char *file, int line, const char *format, ...)
{
	nccl_logger to = __atomic_load_n(&logger, __ATOMIC_RELAXED);
	char text[2048];
	va_list arguments;

	if (!to)
		return;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	to(level, NCCL_LOG_OF_INIT | NCCL_LOG_OF_NET, file, line, "NET/" NAME ": %s", text);
}

/* --- the relay ----------------------------------------------------------------- */

/* Everything here is the lock's. It is held in calls to libpeerlane, whose own locks
 * fork() takes; so no handler of ours takes it before fork(), and a child begins anew. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct relay *current;
/* As the virtual topology file has them (topo.VirtualSwitch): NCCL finds a device there by
 * its name. */
static char name[PEERLANE_MAX_LANES][sizeof "peerlane_4294967295"];

static unsigned fork_count;

unsigned forks(void) { return __atomic_load_n(&fork_count, __ATOMIC_RELAXED); }

static void in_child(void)
{
	pthread_mutex_init(&lock, NULL);
	current = NULL; /* whoever uses the parent's gives it back */
	fork_count++;
	forget_attempts();
	forget_registering();
}

__attribute__((constructor)) static void handle_fork(void) { pthread_atfork(NULL, NULL, in_child); }

static bool is_set(const char *variable)
{
	const char *value = getenv(variable);

	return value && *value && strcmp(value, "0");
}

/* unused gives one use back, with the lock. What nobody uses any more is the caller's to
 * end(), without it: that waits for other relays. */
static struct relay *unused(struct relay *r) { return r && --r->uses == 0 ? r : NULL; }

static void end(struct relay *r)
{
	struct tie *next;

	for (struct tie *t = r ? r->ties : NULL; t; t = next) {
		next = t->next;
		peerlane_close(t->session);
		forget_regions(t->regions);
		free(t);
	}
	free(r);
}

/* tie_to dials one more session. */
static int tie_to(struct tie **out)
{
	struct tie *t = calloc(1, sizeof *t);
	int status;

	if (!t)
		return PEERLANE_STATUS_FULL;
	peerlane_set_program(PEERLANE_PROGRAM_NCCL);
	if ((status = peerlane_dial(getenv("PEERLANE_SOCKET"), NULL, 0, -1, &t->session)))
		free(t);
	else
		*out = t;
	return status;
}

int use_tie(struct relay *r, struct tie **out)
{
	struct tie *t;
	int status = 0;

	pthread_mutex_lock(&lock);
	/* One that has failed by itself ends with its communicators. */
	for (t = r->ties; t && (t->uses >= TIE_USES || peerlane_session_status(t->session)); t = t->next)
		;
	if (!t) {
		pthread_mutex_unlock(&lock); /* to dial is to wait for the relay */
		status = tie_to(&t);
		pthread_mutex_lock(&lock);
		if (!status) {
			t->next = r->ties->next; /* the first is the relay's own */
			r->ties->next = t;
		}
	}
	if (!status) {
		t->uses++;
		*out = t;
	}
	pthread_mutex_unlock(&lock);
	return status;
}

void same_tie(struct tie *t)
{
	pthread_mutex_lock(&lock);
	t->uses++;
	pthread_mutex_unlock(&lock);
}

void leave_tie(struct tie *t)
{
	pthread_mutex_lock(&lock);
	t->uses--;
	pthread_mutex_unlock(&lock);
}

/* dial makes a session, and asks for its lanes. */
static int dial(struct relay *r)
{
	int status = tie_to(&r->ties);

	if (!status)
		status = peerlane_lanes(r->ties->session, r->lane, PEERLANE_MAX_LANES, &r->lanes);
	if (status)
		return status;
	for (unsigned i = 0; i < r->lanes; i++) {
		static const peerlane_gpu none;

		if (!memcmp(&r->lane[i].gpu, &none, sizeof none)) {
			warn("the relay does not know the UUID of its GPU %u: load NVIDIA's driver on the host and run peerlane cdi refresh", r->lane[i].index);
			return PEERLANE_STATUS_INTERNAL;
		}
		status = peerlane_lane_nic(r->ties->session, &r->lane[i].gpu, &r->nic[i]);
		if (status == PEERLANE_STATUS_VERSION) { /* NCCL hears of a NIC without a number then */
			warn("%s", peerlane_error());
			memset(&r->nic[i], 0, sizeof r->nic[i]);
		} else if (status) {
			return status;
		}
		for (char *c = r->nic[i].name; *c; c++) /* it goes into logs */
			if (*c <= ' ' || *c > '~')
				*c = '?';
	}
	if (!r->lanes)
		warn("the container was given no lane; start it with --device peerlane.dev/lane=N [PL1401]");
	return r->lanes ? 0 : PEERLANE_STATUS_INTERNAL;
}

/* without decides what a process without a relay does. Ranks that disagree about their
 * network hang, so it must not take another one unless it was told that it may. NCCL
 * takes another when init() fails, unless NCCL_NET names this one: then everything but
 * init() fails. */
static int without(struct relay *r, const char *why)
{
	const char *named = getenv("NCCL_NET");

	warn("%s", why);
	if (r->ties)
		peerlane_close(r->ties->session);
	free(r->ties);
	r->ties = NULL;
	if (is_set("PEERLANE_NCCL_FALLBACK"))
		warn("NCCL may take another network (PEERLANE_NCCL_FALLBACK); ranks that do not all take the same one hang");
	else if (!named || strcasecmp(named, NAME))
		return 0;
	return NCCL_SYSTEM_ERROR;
}

/* other_network reports whether the user has named another network. */
static bool other_network(void)
{
	const char *network = getenv("NCCL_NET");

	return network && *network && strcasecmp(network, NAME);
}

/* Where NCCL looks where nothing names a topology file: a cloud's, of the machine. */
#define CLOUDS_TOPOLOGY "/var/run/nvidia-topologyd/virtualTopology.xml"

/* name_topology has NCCL read the topology file that lies beside the relay's socket: each
 * GPU of the container beside the virtual NIC of its lane. NCCL calls init() before it
 * looks for one (commAlloc and initTransportsRank, 2.19 to 2.30), and sets variables in this
 * way itself, of nccl.conf. Who has named one, or another network, has it. */
static void name_topology(void)
{
	const char *socket = getenv("PEERLANE_SOCKET"), *wanted = getenv("PEERLANE_NCCL_TOPOLOGY"), *end;
	char file[4096];

	if (getenv("NCCL_TOPO_FILE") || other_network() || (wanted && !strcmp(wanted, "0")))
		return;
	if (!socket || !*socket)
		socket = "/run/peerlane/relay.sock";
	if (!(end = strrchr(socket, '/')) || snprintf(file, sizeof file, "%.*s/nccl-topology.xml", (int)(end - socket), socket) >= (int)sizeof file)
		return;
	if (access(file, R_OK) || !access(CLOUDS_TOPOLOGY, R_OK) || setenv("NCCL_TOPO_FILE", file, 0))
		return;
	inform("NCCL_TOPO_FILE is %s now, the virtual switch of this container (PEERLANE_NCCL_TOPOLOGY=0: not)", file);
}

/* is_local reports whether a lane reaches only this host: the relay then tells a rate, and
 * names no NIC. */
static bool is_local(const struct peerlane_nic *nic) { return nic->mbps && !*nic->name; }

/* Variables of NCCL's for ranks of one host. A copy takes some 10 us besides its bytes, so
 * larger messages are fewer copies: a step of a collective is an eighth of NCCL_BUFFSIZE, and
 * one of a send NCCL_P2P_NET_CHUNKSIZE, which NCCL limits to that eighth. The channels of sends
 * NCCL reads before init(): the hook sets them in the container's nccl.conf. */
static const struct {
	const char *name, *value;
} of_one_host[] = {
	{"NCCL_BUFFSIZE", "16777216"},
	{"NCCL_P2P_NET_CHUNKSIZE", "2097152"},
};

/* enlarge_messages sets variables which hold for all communicators of the process, before
 * NCCL reads them (initTransportsRank, after init()). So it does that only in a container of
 * one lane, which is local: there every other rank is behind this network. With several lanes
 * NVLink joins GPUs of the container, and its settings stay NCCL's. */
static void enlarge_messages(const struct relay *r)
{
	if (r->lanes != 1 || !is_local(&r->nic[0]) || other_network())
		return;
	for (size_t i = 0; i < sizeof of_one_host / sizeof *of_one_host; i++)
		if (!getenv(of_one_host[i].name) && !setenv(of_one_host[i].name, of_one_host[i].value, 0))
			inform("%s is %s now: the only lane of this container reaches only this host (a value of your own takes precedence)", of_one_host[i].name, of_one_host[i].value);
}

bool reaches_only_host(const struct relay *r)
{
	bool local = r->lanes && !other_network();

	for (unsigned i = 0; local && i < r->lanes; i++)
		local = is_local(&r->nic[i]);
	return local;
}

bool lanes_are_local(void)
{
	bool local;

	pthread_mutex_lock(&lock);
	local = current && reaches_only_host(current);
	pthread_mutex_unlock(&lock);
	return local;
}

/* bottleneck names the slowest part of a lane that its relay knows, and its rate. */
static const char *bottleneck(const struct peerlane_nic *nic, char text[PLACE])
{
	if (!nic->mbps)
		return "unknown, for the plan has no rate";
	if (is_local(nic))
		snprintf(text, PLACE, "the links between GPUs of this host, %.1f GB/s", (double)nic->mbps / 8000);
	else
		snprintf(text, PLACE, "NIC %s, %.1f GB/s", nic->name, (double)nic->mbps / 8000);
	return text;
}

int use_relay(struct relay **out)
{
	struct relay *before = NULL;
	int error = 0;

	pthread_mutex_lock(&lock);
	/* One that has died has a successor, for who comes from now on. Until that is there
	 * the dead one says what devices there are: some versions ask only once. */
	if (!current || !current->ties || peerlane_session_status(current->ties->session)) {
		struct relay *r = calloc(1, sizeof *r);

		if (!r) {
			error = NCCL_SYSTEM_ERROR;
		} else if (dial(r) && (error = without(r, *peerlane_error() ? peerlane_error() : no_relay))) {
			free(r);
		} else {
			before = unused(current);
			r->uses = 1;
			current = r;
			for (unsigned i = 0; i < r->lanes; i++) {
				char text[PLACE], slowest[PLACE];

				snprintf(name[i], sizeof name[i], "peerlane_%u", r->lane[i].index);
				inform("%s is the lane of %s; bottleneck: %s", name[i], place(r, (int)i, text), bottleneck(&r->nic[i], slowest));
			}
			if (r->lanes) {
				name_topology();
				enlarge_messages(r);
			}
		}
	}
	if (!error) {
		current->uses++;
		*out = current;
	}
	pthread_mutex_unlock(&lock);
	end(before);
	return error;
}

struct relay *same_relay(struct relay *r)
{
	pthread_mutex_lock(&lock);
	if (!r)
		r = current;
	if (r)
		r->uses++;
	pthread_mutex_unlock(&lock);
	return r;
}

void leave_relay(struct relay *r)
{
	pthread_mutex_lock(&lock);
	r = unused(r);
	pthread_mutex_unlock(&lock);
	end(r);
}

int finalize(void *context)
{
	struct relay *last = NULL, *r;

	/* NCCL 2.28 finalizes also what init() has refused: that has no context. */
	pthread_mutex_lock(&lock);
	r = unused(context);
	if (current && current->uses == 1) { /* ours alone: no communicator is left */
		last = unused(current);
		current = NULL;
	}
	pthread_mutex_unlock(&lock);
	end(r);
	end(last);
	return NCCL_SUCCESS;
}

int nccl_error(int status)
{
	switch (status) {
	case PEERLANE_STATUS_PEER_CLOSED:
	case PEERLANE_STATUS_PEER_CLIENT_DIED:
	case PEERLANE_STATUS_PEER_RELAY_DIED:
	case PEERLANE_STATUS_PEER_CONTAINER_DIED:
	case PEERLANE_STATUS_UNREACHABLE:
	case PEERLANE_STATUS_BAD_HANDLE:
		return NCCL_REMOTE_ERROR;
	case PEERLANE_STATUS_INVALID:
	case PEERLANE_STATUS_OUT_OF_RANGE:
	case PEERLANE_STATUS_TRUNCATED:
		return NCCL_INVALID_ARGUMENT;
	case PEERLANE_STATUS_INTERNAL:
		return NCCL_INTERNAL_ERROR;
	}
	return NCCL_SYSTEM_ERROR;
}

const char *place(const struct relay *r, int device, char text[PLACE])
{
	bool known = device >= 0 && (unsigned)device < r->lanes;
	const char *nic = known ? r->nic[device].name : "";
	char gpu[41] = "an unknown GPU", host[65] = "";

	if (known)
		peerlane_gpu_format(&r->lane[device].gpu, gpu);
	gethostname(host, sizeof host - 1);
	snprintf(text, PLACE, "%s (peerlane.dev/lane=%u%s%s), host %s", gpu, known ? r->lane[device].index : 0, *nic ? ", NIC " : "", nic, host);
	return text;
}

/* --- devices -------------------------------------------------------------------- */

int count_devices(int *n)
{
	struct relay *r = same_relay(NULL);

	if (!r)
		return NCCL_INVALID_USAGE;
	*n = r->lanes ? (int)r->lanes : 1; /* without a relay NCCL has to come as far as listen() */
	leave_relay(r);
	return NCCL_SUCCESS;
}

/* pointers are the kinds of memory that NCCL may register. NCCL's own buffers cannot be
 * exported where it does not make them with cuMemCreate: then it is not offered GPU
 * memory, and its kernels read and write host memory. */
static int pointers(void)
{
	static bool announced;
	const char *wanted = getenv("PEERLANE_NCCL_POINTERS"), *cumem = getenv("NCCL_CUMEM_ENABLE");

	if (wanted && !strcasecmp(wanted, "host"))
		return NCCL_POINTER_HOST;
	if ((wanted && !strcasecmp(wanted, "cuda")) || !cumem || strcmp(cumem, "0"))
		return NCCL_POINTER_HOST | NCCL_POINTER_CUDA;
	if (!__atomic_exchange_n(&announced, true, __ATOMIC_RELAXED))
		warn("NCCL_CUMEM_ENABLE=0: NCCL's buffers cannot be shared with the relay, and all data goes through host memory; unset it, or have legacy CUDA IPC tried (PEERLANE_NCCL_POINTERS=cuda, and relay.cuda_ipc on the host)");
	return NCCL_POINTER_HOST;
}

#define FASTEST 100000000 /* Mbit/s */

static int speed(const struct peerlane_nic *nic)
{
	const char *text = getenv("PEERLANE_NCCL_SPEED");
	long value = text ? strtol(text, NULL, 10) : 0;

	if (value <= 0 || value > FASTEST)
		value = nic->mbps <= FASTEST ? nic->mbps : FASTEST;
	return value ? (int)value : SPEED;
}

/* guid tells NCCL which devices share a NIC. A lane whose NIC has none is by itself. */
static uint64_t guid(const struct relay *r, int device)
{
	uint64_t of_gpu[2];

	if (r->nic[device].guid)
		return r->nic[device].guid;
	memcpy(of_gpu, r->lane[device].gpu.bytes, sizeof of_gpu);
	return of_gpu[0] ^ of_gpu[1];
}

int describe(int device, struct nccl_net_properties_v12 *p)
{
	struct relay *r = same_relay(NULL);
	struct peerlane_nic nic = {0};
	int n;

	if (!r)
		return NCCL_INVALID_USAGE;
	n = r->lanes ? (int)r->lanes : 1;
	if (device >= 0 && device < n) {
		nic = r->nic[device];
		nic.guid = guid(r, device);
	}
	leave_relay(r);
	if (device < 0 || device >= n) {
		warn("device %d of %d", device, n);
		return NCCL_INVALID_ARGUMENT;
	}
	*p = (struct nccl_net_properties_v12){
		.name = *name[device] ? name[device] : "peerlane_0",
		.guid = nic.guid,
		.pointers = pointers(),
		.speed = speed(&nic),
		.port = nic.port ? (int)nic.port : 1,
		.max_communicators = PEERLANE_MAX_CONNECTIONS,
		.max_receives = NCCL_MAX_RECEIVES,
		.device_type = NCCL_DEVICE_HOST,
		.of = {1, {device}},
		.max_p2p_bytes = LARGEST,
		.max_collective_bytes = LARGEST,
		.max_multi_request = 1,
		.rail = NCCL_NO_ID,
		.plane = NCCL_NO_ID,
	};
	return NCCL_SUCCESS;
}

