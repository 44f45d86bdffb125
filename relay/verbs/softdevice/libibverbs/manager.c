// The connection manager, librdmacm's: who listens at a device's address has a socket in
// the host's directory, named by address and port, and a connection is a stream to it, on
// which both sides say which queue pair they have. Each connection and each listener has a
// thread, which makes its events.
#include "softdevice.h"

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PRIVATE = 56 };

struct event {
	struct rdma_cm_event ibv;
	uint8_t data[PRIVATE];
	struct event *next;
};

struct events {
	struct rdma_event_channel ibv; // an eventfd that counts them
	struct event *first;
};

// said is what one side tells the other, once.
struct said {
	uint32_t pair; // 0 is a refusal
	uint8_t bytes, data[PRIVATE];
};

struct id {
	struct rdma_cm_id ibv;
	int fd; // a listener's, or a connection's; -1
	bool listens, asks, answered, running;
	struct said said;
	pthread_t thread;
};

// lent are the devices that IDs are on, opened once for all of them.
static struct lent {
	struct ibv_context *context;
	int ids;
} lent[DEVICES];

static void happens(struct id *of, struct id *listener, int kind, int status, const struct said *said)
{
	struct event *e = calloc(1, sizeof *e);
	if (!e)
		return;
	e->ibv = (struct rdma_cm_event){.id = &of->ibv, .listen_id = listener ? &listener->ibv : NULL, .event = kind, .status = status};
	if (said && said->bytes) {
		memcpy(e->data, said->data, PRIVATE);
		e->ibv.param.conn.private_data = e->data;
		e->ibv.param.conn.private_data_len = PRIVATE; // padded, as some transports do
	}
	struct events *events = (struct events *)of->ibv.channel;
	pthread_mutex_lock(&lock);
	struct event **at = &events->first;
	while (*at)
		at = &(*at)->next;
	*at = e;
	pthread_mutex_unlock(&lock);
	if (eventfd_write(events->ibv.fd, 1) != 0)
		host_log("event of a connection lost");
}

API struct rdma_event_channel *rdma_create_event_channel(void)
{
	struct rule rule = host_script("rdma_create_event_channel", NULL);
	struct events *e = rule.error ? NULL : calloc(1, sizeof *e);
	if (e && (e->ibv.fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC)) < 0) {
		free(e);
		e = NULL;
	}
	host_log("rdma_create_event_channel = %d", e ? 0 : rule.error);
	if (rule.error)
		errno = rule.error;
	return e ? &e->ibv : NULL;
}

API void rdma_destroy_event_channel(struct rdma_event_channel *channel)
{
	struct events *e = (struct events *)channel;
	host_log("rdma_destroy_event_channel = 0");
	for (struct event *next; e->first; e->first = next) { // every ID is destroyed before, and what it was told
		next = e->first->next;
		free(e->first);
	}
	close(e->ibv.fd);
	free(e);
}

API int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
	struct events *e = (struct events *)channel;
	eventfd_t n;
	if (eventfd_read(channel->fd, &n) != 0)
		return -1;
	pthread_mutex_lock(&lock);
	struct event *first = e->first;
	e->first = first->next;
	pthread_mutex_unlock(&lock);
	*event = &first->ibv;
	return 0;
}

API int rdma_ack_cm_event(struct rdma_cm_event *event)
{
	free(event);
	return 0;
}

static struct id *made(struct rdma_event_channel *channel, void *user, int space)
{
	struct id *i = calloc(1, sizeof *i);
	if (i) {
		i->ibv.channel = channel;
		i->ibv.context = user;
		i->ibv.ps = space;
		i->fd = -1;
	}
	return i;
}

API int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *user, int space)
{
	struct rule rule = host_script("rdma_create_id", NULL);
	struct id *i = rule.error ? NULL : made(channel, user, space);
	host_log("rdma_create_id = %d", rule.error);
	if (!i) {
		errno = rule.error ? rule.error : ENOMEM;
		return -1;
	}
	*id = &i->ibv;
	return 0;
}

static const char *of(struct rdma_cm_id *id) { return id->verbs ? id->verbs->device->name : "none"; }

// sit has an ID be on the device of an address, which is opened for the first.
static int sit(struct id *i, const struct sockaddr *address)
{
	const struct sockaddr_in *in = (const struct sockaddr_in *)address;
	int n, error = EADDRNOTAVAIL;
	struct ibv_device **list = in->sin_family == AF_INET ? ibv_get_device_list(&n) : NULL;
	if (!list)
		return error;
	for (struct ibv_device **d = list; *d; d++) {
		struct description *is = &((struct device *)*d)->described;
		if (is->transport != IBV_TRANSPORT_IWARP || is->address != ntohl(in->sin_addr.s_addr))
			continue;
		error = ENOMEM;
		for (struct lent *l = lent; l < lent + DEVICES && !i->ibv.verbs; l++) {
			if (l->context && strcmp(l->context->device->name, (*d)->name))
				continue;
			if (!l->context && !(l->context = ibv_open_device(*d)))
				break;
			l->ids++;
			i->ibv.verbs = l->context;
			i->ibv.port_num = 1;
			i->ibv.route.src.in = *in;
			error = 0;
		}
		break;
	}
	ibv_free_device_list(list);
	return error;
}

static pthread_mutex_t sitting = PTHREAD_MUTEX_INITIALIZER;

static int sits(struct id *i, const struct sockaddr *address)
{
	pthread_mutex_lock(&sitting);
	int error = sit(i, address);
	pthread_mutex_unlock(&sitting);
	return error;
}

static int result(int error)
{
	errno = error;
	return error ? -1 : 0;
}

API int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address)
{
	struct rule rule = host_script("rdma_bind_addr", NULL);
	int error = rule.error ? rule.error : sits((struct id *)id, address);
	host_log("rdma_bind_addr device=%s = %d", of(id), error);
	return result(error);
}

// rises has an ID be on its device no longer, which is closed with the last.
static void rises(struct id *i)
{
	pthread_mutex_lock(&sitting);
	for (struct lent *l = lent; l < lent + DEVICES; l++)
		if (i->ibv.verbs && l->context == i->ibv.verbs && --l->ids == 0) {
			ibv_close_device(l->context);
			l->context = NULL;
		}
	pthread_mutex_unlock(&sitting);
	free(i);
}

API int rdma_destroy_id(struct rdma_cm_id *id)
{
	struct id *i = (struct id *)id;
	struct events *events = (struct events *)id->channel;
	struct id *requests = NULL; // that nobody has taken, by their contexts
	int fd = i->fd;
	host_script("rdma_destroy_id", of(id));
	if (fd >= 0)
		shutdown(fd, SHUT_RDWR);
	if (i->running)
		pthread_join(i->thread, NULL);
	if (fd >= 0)
		close(fd);
	// What nobody has heard of it yet is not heard any more.
	pthread_mutex_lock(&lock);
	for (struct event **at = &events->first; *at;) {
		struct event *e = *at;
		eventfd_t n;
		if (e->ibv.id != id && e->ibv.listen_id != id) {
			at = &e->next;
			continue;
		}
		*at = e->next;
		if (eventfd_read(events->ibv.fd, &n) != 0)
			host_log("event of a connection counted twice");
		if (e->ibv.id != id) {
			struct id *request = (struct id *)e->ibv.id;
			request->ibv.context = requests;
			requests = request;
		}
		free(e);
	}
	pthread_mutex_unlock(&lock);
	for (struct id *next; requests; requests = next) {
		next = requests->ibv.context;
		close(requests->fd);
		rises(requests);
	}
	rises(i);
	host_log("rdma_destroy_id = 0");
	return 0;
}

static socklen_t name(struct sockaddr_un *a, const struct sockaddr_in *at)
{
	*a = (struct sockaddr_un){.sun_family = AF_UNIX};
	snprintf(a->sun_path, sizeof a->sun_path, "/proc/self/fd/%d/cm-%08x-%u", host_directory(), ntohl(at->sin_addr.s_addr), ntohs(at->sin_port));
	return sizeof *a;
}

static bool put(int fd, const struct said *s) { return send(fd, s, sizeof *s, MSG_NOSIGNAL) == sizeof *s; }
static bool get(int fd, struct said *s) { return recv(fd, s, sizeof *s, MSG_WAITALL) == sizeof *s; }

// taken is who has connected to a listener: what he says is heard before anybody hears of
// him.
static void taken(struct id *listener, int fd)
{
	struct said said;
	struct id *i = made(listener->ibv.channel, NULL, listener->ibv.ps);
	if (!i || !get(fd, &said)) {
		close(fd);
		free(i);
		return;
	}
	i->fd = fd;
	i->said = said;
	i->ibv.route.dst = listener->ibv.route.src;
	if (sits(i, (struct sockaddr *)&listener->ibv.route.src.in) != 0) { // it is gone
		close(fd);
		free(i);
		return;
	}
	happens(i, listener, RDMA_CM_EVENT_CONNECT_REQUEST, 0, &said);
}

static void *listens(void *listener)
{
	struct id *i = listener;
	for (;;) {
		int fd = accept4(i->fd, NULL, NULL, SOCK_CLOEXEC);
		if (fd < 0 && errno == EINTR)
			continue;
		if (fd < 0)
			return NULL;
		taken(i, fd);
	}
}

API int rdma_listen(struct rdma_cm_id *id, int backlog)
{
	struct id *i = (struct id *)id;
	struct sockaddr_un a;
	struct rule rule = host_script("rdma_listen", of(id));
	int error = rule.error;
	if (!error && !id->verbs)
		error = EINVAL;
	if (!error && !id->route.src.in.sin_port)
		id->route.src.in.sin_port = htons((uint16_t)(32768 + host_number() % 28000));
	if (!error) {
		socklen_t n = name(&a, &id->route.src.in);
		i->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
		unlink(a.sun_path); // of one that is gone: ports are given out once
		if (i->fd < 0 || bind(i->fd, (struct sockaddr *)&a, n) != 0 || listen(i->fd, backlog) != 0)
			error = errno;
		else if ((error = pthread_create(&i->thread, NULL, listens, i)) == 0)
			i->running = i->listens = true;
	}
	host_log("rdma_listen device=%s port=%u = %d", of(id), ntohs(id->route.src.in.sin_port), error);
	return result(error);
}

API uint16_t rdma_get_src_port(struct rdma_cm_id *id) { return id->route.src.in.sin_port; }

API int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *source, struct sockaddr *destination, int milliseconds)
{
	struct id *i = (struct id *)id;
	struct rule rule = host_script("rdma_resolve_addr", NULL);
	// Without a source it goes by the device that has the other's address: within a host.
	int error = rule.error ? rule.error : sits(i, source ? source : destination);
	host_log("rdma_resolve_addr device=%s within=%d = %d", of(id), milliseconds, error);
	if (error)
		return result(error);
	id->route.dst.in = *(struct sockaddr_in *)destination;
	happens(i, NULL, RDMA_CM_EVENT_ADDR_RESOLVED, 0, NULL);
	return 0;
}

API int rdma_resolve_route(struct rdma_cm_id *id, int milliseconds)
{
	struct rule rule = host_script("rdma_resolve_route", of(id));
	host_log("rdma_resolve_route device=%s within=%d = %d", of(id), milliseconds, rule.error);
	if (rule.error)
		return result(rule.error);
	happens((struct id *)id, NULL, RDMA_CM_EVENT_ROUTE_RESOLVED, 0, NULL);
	return 0;
}

API int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes)
{
	if (!id->verbs || pd->context != id->verbs)
		return result(EINVAL);
	if (!(id->qp = ibv_create_qp(pd, attributes)))
		return -1;
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
	return result(ibv_modify_qp(id->qp, &init, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS));
}

// pairing is held by whoever takes a connection's pair from it, and by its thread while it
// has the pair: who gives up may destroy the pair before the answer has come.
static pthread_mutex_t pairing = PTHREAD_MUTEX_INITIALIZER;

API void rdma_destroy_qp(struct rdma_cm_id *id)
{
	pthread_mutex_lock(&pairing);
	struct ibv_qp *pair = id->qp;
	id->qp = NULL;
	pthread_mutex_unlock(&pairing);
	ibv_destroy_qp(pair);
}

// lasts waits for the end of a connection that is there. The pair sends what it is given
// from now on, and fails with the connection.
static void lasts(struct id *i, uint32_t to, const struct said *said)
{
	char nothing;
	pthread_mutex_lock(&pairing);
	if (i->ibv.qp)
		pair_connect((struct pair *)i->ibv.qp, to, i->fd);
	pthread_mutex_unlock(&pairing);
	happens(i, NULL, RDMA_CM_EVENT_ESTABLISHED, 0, said);
	if (recv(i->fd, &nothing, 1, 0) > 0)
		return;
	pthread_mutex_lock(&pairing);
	pthread_mutex_lock(&lock);
	if (i->ibv.qp)
		pair_fail((struct pair *)i->ibv.qp, false);
	pthread_mutex_unlock(&lock);
	pthread_mutex_unlock(&pairing);
	happens(i, NULL, RDMA_CM_EVENT_DISCONNECTED, 0, NULL);
}

static void *asks(void *id)
{
	struct id *i = id;
	struct rule rule = host_script("rdma_connect answer", of(&i->ibv)); // its delay
	struct sockaddr_un a;
	socklen_t n = name(&a, &i->ibv.route.dst.in);
	struct said answer;
	(void)rule;
	if (connect(i->fd, (struct sockaddr *)&a, n) != 0 || !put(i->fd, &i->said))
		happens(i, NULL, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED, NULL);
	else if (!get(i->fd, &answer))
		happens(i, NULL, RDMA_CM_EVENT_REJECTED, -ECONNRESET, NULL);
	else if (!answer.pair)
		happens(i, NULL, RDMA_CM_EVENT_REJECTED, -ECONNREFUSED, &answer);
	else
		lasts(i, answer.pair, &answer);
	return NULL;
}

static void *answers(void *id)
{
	struct id *i = id;
	lasts(i, i->said.pair, NULL);
	return NULL;
}

// say has an ID say its part, and its thread begin.
static int say(struct id *i, const struct rdma_conn_param *p, void *(*thread)(void *))
{
	struct said said = {.pair = i->ibv.qp->qp_num, .bytes = p->private_data_len};
	if (p->private_data_len > PRIVATE)
		return EINVAL;
	if (p->private_data_len)
		memcpy(said.data, p->private_data, p->private_data_len);
	if (thread == asks)
		i->said = said;
	else if (!put(i->fd, &said))
		return ECONNRESET;
	int error = pthread_create(&i->thread, NULL, thread, i);
	i->running = !error;
	return error;
}

API int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
	struct id *i = (struct id *)id;
	struct rule rule = host_script("rdma_connect", of(id));
	int error = rule.error;
	if (!error && (!id->qp || i->fd >= 0))
		error = EINVAL;
	if (!error && (i->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0)
		error = errno;
	if (!error)
		error = say(i, parameters, asks);
	host_log("rdma_connect device=%s to=%u private=%u = %d", of(id), ntohs(id->route.dst.in.sin_port), parameters->private_data_len, error);
	return result(error);
}

API int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *parameters)
{
	struct id *i = (struct id *)id;
	struct rule rule = host_script("rdma_accept", of(id));
	int error = rule.error;
	if (!error && (!id->qp || i->fd < 0 || i->running))
		error = EINVAL;
	if (!error)
		error = say(i, parameters, answers);
	host_log("rdma_accept device=%s = %d", of(id), error);
	return result(error);
}

API int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t n)
{
	struct id *i = (struct id *)id;
	struct said no = {.bytes = n};
	if (n > PRIVATE || i->fd < 0 || i->running)
		return result(EINVAL);
	if (n)
		memcpy(no.data, data, n);
	host_log("rdma_reject device=%s private=%u = 0", of(id), n);
	return put(i->fd, &no) ? 0 : -1;
}

API int rdma_disconnect(struct rdma_cm_id *id)
{
	struct id *i = (struct id *)id;
	if (i->fd < 0)
		return result(EINVAL);
	shutdown(i->fd, SHUT_RDWR);
	return 0;
}
