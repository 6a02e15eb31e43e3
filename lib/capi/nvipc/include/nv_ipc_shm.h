/* A mapped file in the IPC directory. In libnvipc.so. */
#ifndef NV_IPC_SHM_H_INCLUDED_
#define NV_IPC_SHM_H_INCLUDED_

#include <stddef.h>

#if defined(__cplusplus)
extern "C" {
#endif

typedef struct nv_ipc_shm_t nv_ipc_shm_t;
struct nv_ipc_shm_t
{
    void *(*get_mapped_addr)(nv_ipc_shm_t *ipc_shm);
    size_t (*get_size)(nv_ipc_shm_t *ipc_shm);
    /* Unmaps the file; the primary removes it. */
    int (*close)(nv_ipc_shm_t *ipc_shm);
};

/* The primary creates the file, filled with zeros. Others open it; with a size of 0 they map all of it. NULL on failure. */
nv_ipc_shm_t *nv_ipc_shm_open(int primary, const char *name, size_t size);

#if defined(__cplusplus)
}
#endif

#endif
