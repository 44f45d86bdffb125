// Devices, ports, GIDs, events.
#include "softdevice.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct context *contexts;

API struct ibv_device **ibv_get_device_list(int *n)
{
	struct rule rule = host_script("ibv_get_device_list", NULL);
	struct description all[DEVICES];
	int found = host_devices(all, DEVICES);
	if (rule.error || found < 0) {
		errno = rule.error ? rule.error : ENOSYS;
		return NULL;
	}
	struct ibv_device **list = calloc((size_t)found + 1, sizeof *list);
	for (int i = 0; list && i < found; i++) {
		struct device *d = calloc(1, sizeof *d);
		if (!d)
			break;
		d->described = all[i];
		d->ibv.transport_type = all[i].transport;
		d->ibv.node_type = all[i].transport == IBV_TRANSPORT_IWARP ? IBV_NODE_RNIC : IBV_NODE_CA;
		memcpy(d->ibv.name, all[i].name, sizeof d->ibv.name);
		snprintf(d->ibv.dev_name, sizeof d->ibv.dev_name, "uverbs%d", all[i].node);
		list[i] = &d->ibv;
	}
	if (n)
		*n = found;
	return list;
}

API void ibv_free_device_list(struct ibv_device **list)
{
	for (int i = 0; list[i]; i++) {
		bool used = false;
		pthread_mutex_lock(&lock);
		for (struct context *c = contexts; c; c = c->next)
			used |= &c->device->ibv == list[i];
		pthread_mutex_unlock(&lock);
		if (!used)
			free(list[i]);
	}
	free(list);
}

API uint64_t ibv_get_device_guid(struct ibv_device *device)
{
	return htobe64(((struct device *)device)->described.guid);
}

void device_event(struct context *c, struct ibv_async_event event)
{
	host_log("event device=%s type=%d", c->device->described.name, event.event_type);
	if (write(c->events[1], &event, sizeof event) != sizeof event)
		host_log("event device=%s type=%d lost", c->device->described.name, event.event_type);
}

// device_lost reports that all devices of this process have failed. The lock is held.
void device_lost(void)
{
	for (struct context *c = contexts; c; c = c->next)
		device_event(c, (struct ibv_async_event){.event_type = IBV_EVENT_DEVICE_FATAL});
}

// ports looks what has become of the ports of open devices.
static void ports(void)
{
	struct description all[DEVICES];
	int n = host_devices(all, DEVICES);
	pthread_mutex_lock(&lock);
	for (struct context *c = contexts; c; c = c->next)
		for (int i = 0; i < n; i++) {
			struct description *d = &c->device->described;
			if (strcmp(d->name, all[i].name))
				continue;
			int before = d->state;
			d->state = all[i].state;
			if (before != d->state)
				rings_ports(c);
			if (before != d->state)
				device_event(c, (struct ibv_async_event){
					.element.port_num = 1,
					.event_type = d->state == IBV_PORT_ACTIVE ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR,
				});
			if (d->address == all[i].address && d->entry == all[i].entry)
				continue;
			d->address = all[i].address;
			d->entry = all[i].entry;
			device_event(c, (struct ibv_async_event){.element.port_num = 1, .event_type = IBV_EVENT_GID_CHANGE});
		}
	pthread_mutex_unlock(&lock);
}

// A process may load many copies of this library, and have few instances of inotify: it has one
// while a device is open.
static pthread_mutex_t watching = PTHREAD_MUTEX_INITIALIZER;
static int opened;

static void watch(void)
{
	pthread_mutex_lock(&watching);
	int error = opened++ ? 0 : host_watch(ports);
	pthread_mutex_unlock(&watching);
	if (error)
		host_log("changes of the devices are not seen: %s", strerror(error));
}

static void unwatch(void)
{
	pthread_mutex_lock(&watching);
	if (!--opened)
		host_unwatch();
	pthread_mutex_unlock(&watching);
}

API struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct device *d = (struct device *)device;
	struct rule rule = host_script("ibv_open_device", d->ibv.name);
	struct context *c = rule.error ? NULL : calloc(1, sizeof *c);
	host_log("ibv_open_device device=%s = %d", d->ibv.name, rule.error);
	if (!c || pipe2(c->events, O_CLOEXEC) != 0) {
		errno = rule.error ? rule.error : errno;
		free(c);
		return NULL;
	}
	c->device = d;
	c->ibv.device = device;
	c->ibv.ops.poll_cq = queue_poll;
	c->ibv.ops.req_notify_cq = queue_arm;
	c->ibv.ops.post_send = pair_post_send;
	c->ibv.ops.post_recv = pair_post_recv;
	c->ibv.cmd_fd = -1;
	c->ibv.async_fd = c->events[0];
	c->ibv.num_comp_vectors = 1;
	watch();
	pthread_mutex_lock(&lock);
	c->next = contexts;
	contexts = c;
	pthread_mutex_unlock(&lock);
	ports(); // what changed before it was in the list
	return &c->ibv;
}

API int ibv_close_device(struct ibv_context *context)
{
	struct context *c = (struct context *)context;
	pthread_mutex_lock(&lock);
	bool busy = c->domains || c->queues || c->channels;
	for (struct context **at = &contexts; !busy && *at; at = &(*at)->next)
		if (*at == c) {
			*at = c->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	host_log("ibv_close_device device=%s domains=%d queues=%d channels=%d = %d", c->device->ibv.name, c->domains, c->queues, c->channels, busy ? EBUSY : 0);
	if (busy)
		return EBUSY;
	unwatch();
	close(c->events[0]);
	close(c->events[1]);
	free(c->device);
	free(c);
	return 0;
}

API int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *a)
{
	struct description *d = &((struct context *)context)->device->described;
	struct rule rule = host_script("ibv_query_device", d->name);
	if (rule.error)
		return rule.error;
	*a = (struct ibv_device_attr){
		.node_guid = htobe64(d->guid),
		.sys_image_guid = htobe64(d->guid),
		.max_mr_size = UINT64_MAX,
		.page_size_cap = 4096,
		.vendor_id = 0x02c9,
		.vendor_part_id = 4129,
		.max_qp = 1024,
		.max_qp_wr = 4096,
		.max_sge = 1,
		.max_sge_rd = 1,
		.max_cq = 1024,
		.max_cqe = d->entries,
		.max_mr = 65536,
		.max_pd = 1024,
		.max_qp_rd_atom = 16,
		.max_qp_init_rd_atom = 16,
		.max_pkeys = 1,
		.phys_port_cnt = 1,
	};
	snprintf(a->fw_ver, sizeof a->fw_ver, "0.0.0-software");
	return 0;
}

API int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *a)
{
	struct description *d = &((struct context *)context)->device->described;
	struct rule rule = host_script("ibv_query_port", d->name);
	if (rule.error || port != 1)
		return rule.error ? rule.error : EINVAL;
	pthread_mutex_lock(&lock);
	int state = d->state;
	pthread_mutex_unlock(&lock);
	a->state = state;
	a->phys_state = state == IBV_PORT_ACTIVE ? 5 : 3;
	a->max_mtu = IBV_MTU_4096;
	a->active_mtu = d->link_layer == IBV_LINK_LAYER_INFINIBAND ? IBV_MTU_4096 : IBV_MTU_1024;
	a->gid_tbl_len = GIDS;
	a->max_msg_sz = 1 << 30;
	a->pkey_tbl_len = 1;
	a->lid = d->lid;
	a->sm_lid = d->lid ? 1 : 0;
	a->active_width = 2;   // 4X
	a->active_speed = 128; // NDR
	a->link_layer = (uint8_t)d->link_layer;
	a->flags = d->grh ? IBV_QPF_GRH_REQUIRED : 0;
	return 0;
}

// gid is entry i of the table, as the kernel makes it: of each address of the network
// interface one for RoCE v1 and one for v2.
static bool gid(const struct description *d, uint32_t i, struct ibv_gid_entry *e)
{
	unsigned per = d->link_layer == IBV_LINK_LAYER_ETHERNET && d->transport == IBV_TRANSPORT_IB ? 2 : 1;
	uint64_t prefix = htobe64(d->link_layer == IBV_LINK_LAYER_INFINIBAND && i % per == 0 ? d->prefix : 0xfe80ULL << 48), rest = htobe64(d->guid);
	e->gid_type = per == 2 ? i % 2 + 1 : IBV_GID_TYPE_IB;
	if (i / per == d->entry / per && per == 2 && d->address) {
		prefix = 0;
		rest = htobe64(0xffffULL << 32 | d->address);
	} else if (i / per > 0) {
		return false;
	}
	e->gid.global[0] = prefix;
	e->gid.global[1] = rest;
	e->ndev_ifindex = per == 2 ? 1 : 0;
	return true;
}

API int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *e, uint32_t flags, size_t size)
{
	struct description *d = &((struct context *)context)->device->described;
	struct rule rule = host_script("_ibv_query_gid_ex", d->name);
	if (rule.error || flags || port != 1 || index >= GIDS || size != sizeof *e)
		return rule.error ? rule.error : EINVAL;
	*e = (struct ibv_gid_entry){.gid_index = index, .port_num = port};
	return gid(d, index, e) ? 0 : ENODATA;
}

API int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	ssize_t n = read(context->async_fd, event, sizeof *event);
	if (n == sizeof *event)
		return 0;
	if (n >= 0)
		errno = EIO;
	return -1;
}

API void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}
