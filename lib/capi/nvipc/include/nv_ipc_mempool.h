/* Buffers of one size in a file, independent of any link. In libnvipc.so. Any thread of any process may call at any
 * time. */
#ifndef NV_IPC_MEMPOOL_H_INCLUDED_
#define NV_IPC_MEMPOOL_H_INCLUDED_

#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

typedef struct nv_ipc_mempool_t nv_ipc_mempool_t;
struct nv_ipc_mempool_t
{
    /* The index of a free buffer; -1 if there is none. */
    int32_t (*alloc)(nv_ipc_mempool_t *mempool);
    int (*free)(nv_ipc_mempool_t *mempool, int32_t index);
    int (*get_index)(nv_ipc_mempool_t *mempool, void *buf);
    /* NULL for an invalid index. */
    void *(*get_addr)(nv_ipc_mempool_t *mempool, int32_t index);
    int (*get_buf_size)(nv_ipc_mempool_t *mempool);
    int (*get_pool_len)(nv_ipc_mempool_t *mempool);
    int (*close)(nv_ipc_mempool_t *mempool);
    /* An array_queue_t. */
    void *(*get_free_queue)(nv_ipc_mempool_t *mempool);
    int (*get_free_count)(nv_ipc_mempool_t *mempool);
    int (*memcpy_to_host)(nv_ipc_mempool_t *mempool, void *host, const void *device, size_t size);
    int (*memcpy_to_device)(nv_ipc_mempool_t *mempool, void *device, const void *host, size_t size);
};

#define NV_IPC_MEMPOOL_NO_CUDA_DEV (-1)

/* In host memory, whatever the device: device pools belong to a link. NULL on failure. */
nv_ipc_mempool_t *nv_ipc_mempool_open(int primary, const char *name, int buf_size, int pool_len, int cuda_device_id);

/* Makes all buffers free. No other thread may use the pool meanwhile. */
int nv_ipc_mempool_reset(nv_ipc_mempool_t *mempool);

#if defined(__cplusplus)
}
#endif

#endif
