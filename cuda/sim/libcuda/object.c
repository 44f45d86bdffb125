// Reference counts, and the handles of a program. A handle is a number and not a pointer,
// so that the simulator refuses a stale or invented handle as the driver does, and does
// not dereference it.
#include "sim.h"

#include <stdlib.h>

struct slot {
	void *object;
	uint32_t generation;
	uint8_t kind;
	uint32_t free; // index of the next free slot, plus 1
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct slot *slots;
static uint32_t slot_count, first_free; // index plus 1

void object_init(struct object *o, void (*destroy)(struct object *))
{
	atomic_init(&o->references, 1);
	o->destroy = destroy;
}

void *retain(void *object)
{
	if (object)
		atomic_fetch_add(&((struct object *)object)->references, 1);
	return object;
}

void release(void *object)
{
	struct object *o = object;
	if (o && atomic_fetch_sub(&o->references, 1) == 1)
		o->destroy(o);
}

// A handle: kind in bits 56-59 (no valid address has these bits), generation in bits
// 24-55, slot in bits 0-23.
#define SLOTS (1u << 24)

uint64_t handle_new(enum kind kind, void *object)
{
	uint64_t handle = 0;
	pthread_mutex_lock(&mutex);
	if (!first_free && slot_count < SLOTS) {
		uint32_t n = slot_count ? 2 * slot_count : 64;
		struct slot *grown = realloc(slots, n * sizeof *slots);
		if (grown) {
			slots = grown;
			for (uint32_t i = n; i-- > slot_count;) {
				slots[i] = (struct slot){.free = first_free};
				first_free = i + 1;
			}
			slot_count = n;
		}
	}
	if (first_free) {
		uint32_t i = first_free - 1;
		struct slot *s = &slots[i];
		first_free = s->free;
		s->object = object;
		s->kind = kind;
		handle = (uint64_t)kind << 56 | (uint64_t)s->generation << 24 | i;
	}
	pthread_mutex_unlock(&mutex);
	if (!handle)
		release(object);
	return handle;
}

// find returns the live slot of a handle. The caller holds the mutex.
static struct slot *find(enum kind kind, uint64_t handle)
{
	uint32_t i = handle & (SLOTS - 1);
	if (handle >> 56 != (uint64_t)kind || i >= slot_count)
		return NULL;
	struct slot *s = &slots[i];
	return s->object && s->kind == kind && s->generation == (uint32_t)(handle >> 24) ? s : NULL;
}

void *handle_get(enum kind kind, uint64_t handle)
{
	pthread_mutex_lock(&mutex);
	struct slot *s = find(kind, handle);
	void *object = s ? retain(s->object) : NULL;
	pthread_mutex_unlock(&mutex);
	return object;
}

void *handle_take(enum kind kind, uint64_t handle)
{
	pthread_mutex_lock(&mutex);
	struct slot *s = find(kind, handle);
	void *object = NULL;
	if (s) {
		object = s->object;
		s->object = NULL;
		s->generation++;
		s->free = first_free;
		first_free = (uint32_t)(handle & (SLOTS - 1)) + 1;
	}
	pthread_mutex_unlock(&mutex);
	return object;
}
