/* Two named semaphores, one for each direction. In libnvipc.so. */
#ifndef NV_IPC_SEM_H_INCLUDED_
#define NV_IPC_SEM_H_INCLUDED_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define NV_SEM_NAME_MAX_LEN 32

typedef struct nv_ipc_sem_t nv_ipc_sem_t;
struct nv_ipc_sem_t
{
    /* Wakes the other side once. Posts are counted. */
    int (*sem_post)(nv_ipc_sem_t *ipc_sem);
    /* Waits for a post of the other side and consumes it. */
    int (*sem_wait)(nv_ipc_sem_t *ipc_sem);
    /* Number of pending posts for this side. */
    int (*get_value)(nv_ipc_sem_t *ipc_sem, int *value);
    /* The primary removes the semaphores. */
    int (*close)(nv_ipc_sem_t *ipc_sem);
};

/* Either side creates the semaphores if they do not exist. NULL on failure. */
nv_ipc_sem_t *nv_ipc_sem_open(int primary, const char *prefix);

#if defined(__cplusplus)
}
#endif

#endif
