/* NVIPC's queue of numbers, in memory of the caller. In libnvipc.so. Any thread of any process may call at any time. */
#ifndef ARRAY_QUEUE_H_INCLUDED_
#define ARRAY_QUEUE_H_INCLUDED_

#include <stdint.h>
#ifndef __cplusplus
#include <stdatomic.h>
#endif

#if defined(__cplusplus)
extern "C" {
#endif

#ifndef NV_NAME_MAX_LEN
#define NV_NAME_MAX_LEN 32
#endif
#define NV_NAME_SUFFIX_MAX_LEN 16

typedef struct array_queue_t array_queue_t;
struct array_queue_t
{
    int32_t (*get_length)(array_queue_t *queue);
    /* Appends a number below the length. -1 if it is out of range or already in the queue. */
    int (*enqueue)(array_queue_t *queue, int32_t value);
    /* Takes the oldest number; -1 if the queue is empty. */
    int32_t (*dequeue)(array_queue_t *queue);
    /* Frees the handle, not the memory of the queue. */
    int (*close)(array_queue_t *queue);
    char *(*get_name)(array_queue_t *queue);
    int32_t (*get_max_length)(array_queue_t *queue);
    /* Approximate number of values. */
    int32_t (*get_count)(array_queue_t *queue);
    /* The value after `base`, or the oldest one for -1; -1 if there is none. No other thread may use the queue
     * meanwhile. */
    int32_t (*get_next)(array_queue_t *queue, int32_t base);
};

static inline int32_t align_8(int32_t number)
{
    return (number + 7) / 8 * 8;
}

/* Size of a queue of this length in bytes. It must begin at a multiple of 8. */
#define ARRAY_QUEUE_HEADER_SIZE(length) (32 + 8 * (int32_t)(length))

/* Opens a queue over such memory. The primary empties it. NULL on failure. */
array_queue_t *array_queue_open(int primary, const char *name, void *header, int32_t length);

/* Empties the queue. No other thread may use it meanwhile. */
int array_queue_reset(array_queue_t *queue);

#if defined(__cplusplus)
}
#endif

#endif
