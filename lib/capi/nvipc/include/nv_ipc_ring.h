/* A queue of objects by value, in a file or in this process. In libnvipc.so. Any thread may call at any time. */
#ifndef NV_IPC_RING_H_INCLUDED_
#define NV_IPC_RING_H_INCLUDED_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

typedef enum
{
    RING_TYPE_SHM_SECONDARY = 0,
    RING_TYPE_SHM_PRIMARY = 1,
    RING_TYPE_APP_INTERNAL = 2,
    RING_TYPE_INVALID = 3
} ring_type_t;

typedef struct nv_ipc_ring_t nv_ipc_ring_t;
struct nv_ipc_ring_t
{
    /* The index of a free object; -1 if there is none. */
    int32_t (*alloc)(nv_ipc_ring_t *ring);
    int (*free)(nv_ipc_ring_t *ring, int32_t index);
    int (*get_index)(nv_ipc_ring_t *ring, void *buf);
    void *(*get_addr)(nv_ipc_ring_t *ring, int32_t index);
    int (*enqueue_by_index)(nv_ipc_ring_t *ring, int32_t index);
    int32_t (*dequeue_by_index)(nv_ipc_ring_t *ring);
    int (*get_buf_size)(nv_ipc_ring_t *ring);
    /* Copies an object into the ring; -1 if it is full. */
    int (*enqueue)(nv_ipc_ring_t *ring, void *obj);
    /* Copies the oldest object out of the ring; -1 if it is empty. */
    int (*dequeue)(nv_ipc_ring_t *ring, void *obj);
    int (*close)(nv_ipc_ring_t *ring);
    int (*get_count)(nv_ipc_ring_t *ring);
    int (*get_free_count)(nv_ipc_ring_t *ring);
    int (*get_ring_len)(nv_ipc_ring_t *ring);
};

/* NULL on failure. */
nv_ipc_ring_t *nv_ipc_ring_open(ring_type_t type, const char *name, int32_t ring_len, int32_t buf_size);

#if defined(__cplusplus)
}
#endif

#endif
